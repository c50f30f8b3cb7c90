"""Model families: the same model under Megatron's names and shapes, and under those of Hugging Face transformers, as views.

One JSON file per family. `translate` is called by conversions and loads; readers and writers of formats know nothing of it.
"""

from ucformat.families.apply import translate

__all__ = ["translate"]
