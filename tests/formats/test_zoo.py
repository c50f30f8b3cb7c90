"""Models of many libraries: HF → native → DCP → native → HF loads in its library, with the same state and outputs.

All of it takes about half a minute, most of that for imports and many small files. timm and OpenCLIP need torchvision, which has
no build for every torch: their folders are written by hand, in their layout (`test_hf_folders` has more of that kind).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ucformat
from tests.checkpoints import bits
from tests.formats.zoo.models import CLASSES, build
from ucformat.reshard.convert import convert

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries warn about themselves


def library(name: str) -> Any:
    """A library, imported when a test needs it; its types are not what is checked here."""
    return import_module(name)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """The libraries say much, and it is not what is tested."""
    transformers = library("transformers")
    before = logging.root.manager.disable
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    yield
    logging.disable(before)


def around(folder: Path, tmp_path: Path) -> Path:
    """HF → native → DCP → native → HF; the same files with the same tensors come out."""
    convert(str(folder), str(tmp_path / "n1"), "native")
    convert(str(tmp_path / "n1"), str(tmp_path / "d"), "dcp")
    convert(str(tmp_path / "d"), str(tmp_path / "n2"), "native")
    convert(str(tmp_path / "n2"), str(tmp_path / "out"), "hf")
    assert files_of(tmp_path / "out") == files_of(folder)
    for path in folder.rglob("*.safetensors"):
        assert tensors(tmp_path / "out" / path.relative_to(folder)) == tensors(path), path
    return tmp_path / "out"


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def tensors(path: Path) -> dict[str, bytes]:
    return {name: bits(tensor) for name, tensor in load_file(path).items()}


def state(module: Any) -> dict[str, bytes]:
    return {name: bits(tensor) for name, tensor in module.state_dict().items()}


# -- transformers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLASSES)
def test_a_model_of_transformers_comes_back_and_loads_live(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path / "in")
    out = around(tmp_path / "in", tmp_path)
    again, info = type(model).from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert state(again) == state(model)
    live = type(model)(model.config)
    ucformat.load(str(out), into={"model": ucformat.hf_state(live, str(out))})
    assert state(live) == state(model)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MixtralForCausalLM", "BertForMaskedLM", "GPT2LMHeadModel"])
def test_its_outputs_are_the_same(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path / "in", max_shard_size="20KB")
    again = type(model).from_pretrained(around_sharded(tmp_path / "in", tmp_path)).eval()
    words = torch.arange(8)[None]
    assert torch.equal(again(words).logits, model(words).logits)


def around_sharded(folder: Path, tmp_path: Path) -> Path:
    convert(str(folder), str(tmp_path / "n"), "native")
    convert(str(tmp_path / "n"), str(tmp_path / "out"), "hf", max_file_bytes=10_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    return tmp_path / "out"


# -- diffusers ---------------------------------------------------------------------------------------------------------

UNET: dict[str, Any] = {"sample_size": 8, "block_out_channels": (8, 8), "layers_per_block": 1, "norm_num_groups": 4}


def unet() -> Any:
    diffusers = library("diffusers")

    return diffusers.UNet2DModel(**UNET, down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2)


def conditional() -> Any:
    diffusers = library("diffusers")

    return diffusers.UNet2DConditionModel(
        **UNET,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=2,
    )


def autoencoder() -> Any:
    diffusers = library("diffusers")

    return diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4, sample_size=8)


def flux() -> Any:
    diffusers = library("diffusers")

    return diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
    )


@pytest.mark.parametrize("make", [unet, conditional, autoencoder, flux])
def test_a_model_of_diffusers_comes_back(make: Callable[[], Any], tmp_path: Path) -> None:
    model = make()
    model.save_pretrained(tmp_path / "in")
    assert "diffusion_pytorch_model.safetensors" in files_of(tmp_path / "in")
    again = type(model).from_pretrained(around(tmp_path / "in", tmp_path))
    assert state(again) == state(model)


def test_a_sharded_model_of_diffusers_loads(tmp_path: Path) -> None:
    model = unet()
    model.save_pretrained(tmp_path / "in")
    again = type(model).from_pretrained(around_sharded(tmp_path / "in", tmp_path))
    noise = torch.zeros(1, 3, 8, 8)
    assert state(again) == state(model)
    torch.testing.assert_close(again(noise, 1).sample, model.eval()(noise, 1).sample)


def test_a_pipeline_of_diffusers_comes_back(tmp_path: Path) -> None:
    diffusers = library("diffusers")

    pipeline = diffusers.DDPMPipeline(unet(), diffusers.DDPMScheduler(num_train_timesteps=2))
    pipeline.save_pretrained(tmp_path / "in")
    again = diffusers.DDPMPipeline.from_pretrained(around(tmp_path / "in", tmp_path))
    assert state(again.unet) == state(pipeline.unet)


def test_a_pipeline_with_a_text_encoder_comes_back(tmp_path: Path) -> None:
    diffusers = library("diffusers")
    tr = library("transformers")
    vocab = {word: i for i, word in enumerate(["<|startoftext|>", "<|endoftext|>", "a", "b", "a</w>", "b</w>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    config = tr.CLIPTextConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=8
    )
    pipeline = diffusers.StableDiffusionPipeline(
        vae=autoencoder(),
        text_encoder=tr.CLIPTextModel(config),
        tokenizer=tr.CLIPTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")),
        unet=conditional(),
        scheduler=diffusers.DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(tmp_path / "in")
    again = diffusers.StableDiffusionPipeline.from_pretrained(around(tmp_path / "in", tmp_path))
    for part in ("vae", "text_encoder", "unet"):
        assert state(getattr(again, part)) == state(getattr(pipeline, part)), part


# -- sentence-transformers ---------------------------------------------------------------------------------------------

WORDS = ["hello world", "a b c"]


def bert(folder: Path) -> str:
    """A tiny BERT with its tokenizer."""
    tr = library("transformers")
    folder.mkdir(parents=True)
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "hello", "world"]
    (folder / "vocab.txt").write_text("\n".join(vocab))
    config = tr.BertConfig(
        vocab_size=len(vocab), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    tr.BertModel(config).save_pretrained(folder)
    tr.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return str(folder)


def dense(path: Path) -> Any:
    st, models = library("sentence_transformers"), library("sentence_transformers.models")
    parts = [models.Transformer(bert(path)), models.Pooling(16), models.Dense(16, 8)]
    return st.SentenceTransformer(modules=parts, device="cpu")


def router(path: Path) -> Any:
    st, models = library("sentence_transformers"), library("sentence_transformers.models")
    query = [models.Transformer(bert(path / "q")), models.Pooling(16), models.Dense(16, 8)]
    document = [models.Transformer(bert(path / "d")), models.Pooling(16), models.Dense(16, 8)]
    return st.SentenceTransformer(modules=[models.Router.for_query_document(query, document)], device="cpu")


def static(path: Path) -> Any:
    st, models = library("sentence_transformers"), library("sentence_transformers.models")
    tokenizer = library("transformers").AutoTokenizer.from_pretrained(bert(path))
    return st.SentenceTransformer(modules=[models.StaticEmbedding(tokenizer, embedding_dim=8), models.Dense(8, 4)], device="cpu")


@pytest.mark.parametrize("make", [dense, router, static])
def test_a_sentence_model_comes_back(make: Callable[[Path], Any], tmp_path: Path) -> None:
    model = make(tmp_path / "made")
    model.save(str(tmp_path / "in"))
    again = library("sentence_transformers").SentenceTransformer(str(around(tmp_path / "in", tmp_path)), device="cpu")
    encode = "encode_document" if make is router else "encode"
    assert (getattr(again, encode)(WORDS) == getattr(model, encode)(WORDS)).all()


def test_a_cross_encoder_comes_back(tmp_path: Path) -> None:
    st = library("sentence_transformers")
    model = st.CrossEncoder(bert(tmp_path / "made"), num_labels=1, device="cpu")
    model.save_pretrained(str(tmp_path / "in"))
    again = st.CrossEncoder(str(around(tmp_path / "in", tmp_path)), device="cpu")
    assert (again.predict([WORDS]) == model.predict([WORDS])).all()


# -- PEFT --------------------------------------------------------------------------------------------------------------


def lora() -> Any:
    return library("peft").LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def dora() -> Any:
    return library("peft").LoraConfig(
        r=2, target_modules=["q_proj"], use_dora=True, modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    )


def ia3() -> Any:
    return library("peft").IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    )


def prompt() -> Any:
    return library("peft").PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")


@pytest.mark.parametrize("make", [lora, dora, ia3, prompt])
def test_an_adapter_comes_back_and_loads_onto_its_model(make: Callable[[], Any], tmp_path: Path) -> None:
    peft = library("peft")
    build("LlamaForCausalLM").save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(build("LlamaForCausalLM"), make())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "in")
    out = around(tmp_path / "in", tmp_path)
    again = peft.PeftModel.from_pretrained(build("LlamaForCausalLM"), out)
    words = torch.arange(6)[None]
    assert torch.equal(again.eval()(words).logits, model.eval()(words).logits)
    if make is not prompt:
        auto = library("transformers").AutoModelForCausalLM
        both = [auto.from_pretrained(folder).eval()(words).logits for folder in (tmp_path / "in", out)]
        assert torch.equal(*both)


# -- by hand -----------------------------------------------------------------------------------------------------------

BY_HAND: dict[str, tuple[str, dict[str, Any]]] = {
    "timm": ("model.safetensors", {"config.json": {"architecture": "resnet18", "num_classes": 2}}),
    "OpenCLIP": ("open_clip_model.safetensors", {"open_clip_config.json": {"model_cfg": {}}, "tokenizer.json": {}}),
    "Mistral": ("consolidated.safetensors", {"params.json": {"dim": 16}, "tekken.json": {"vocab": []}}),
    "LoRA of diffusers": ("pytorch_lora_weights.safetensors", {}),
}


@pytest.mark.parametrize("library", BY_HAND)
def test_the_layout_of_a_library_comes_back(library: str, tmp_path: Path) -> None:
    name, files = BY_HAND[library]
    (tmp_path / "in").mkdir()
    save_file({"a.weight": torch.ones(2, 2), "a.bias": torch.zeros(2)}, tmp_path / "in" / name, {"format": "pt"})
    for file, content in files.items():
        (tmp_path / "in" / file).write_text(json.dumps(content))
    out = around(tmp_path / "in", tmp_path)
    assert all((out / file).read_bytes() == (tmp_path / "in" / file).read_bytes() for file in files)
