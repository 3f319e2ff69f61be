"""Writes GGUF models to run and test on: a dense model made a mixture of experts, or random weights."""

from bmoe.synth.quantisation import QUANTISATIONS
from bmoe.synth.random_model import random_model
from bmoe.synth.report import SynthReport
from bmoe.synth.shape import PRESETS, ModelShape, tiny_shape
from bmoe.synth.upcycle import upcycle

__all__ = [
    "PRESETS",
    "QUANTISATIONS",
    "ModelShape",
    "SynthReport",
    "random_model",
    "tiny_shape",
    "upcycle",
]
