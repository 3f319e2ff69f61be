"""Chat: a model's own template, its reasoning told from its answer, conversation files.

Nothing here knows llama.cpp or a tokenizer: text goes in and text comes out.
"""
