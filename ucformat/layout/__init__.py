"""Layouts that a user declares: which rank holds which part of which tensor. The language is defined in specs/layout.md.

`language` reads a layout file, `rules` finds the rule of a tensor, `place` computes boxes, `filenames` the names of ranks' files.
Nothing here touches a checkpoint: readers and writers come here with shapes.
"""
