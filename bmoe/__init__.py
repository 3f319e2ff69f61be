"""bmoe: Mixture-of-Experts models bigger than RAM, on CPU, streamed from the SSD."""

__version__ = "0.1.0"
