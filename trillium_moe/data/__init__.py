"""Documents in, [batch, seq_len] arrays out: sources, tokenizers, packing and the pipeline over them."""

from trillium_moe.data.packing import ConcatRows, Documents, FirstFitRows
from trillium_moe.data.pipeline import BatchIterator, Pipeline, load_documents, make_pipeline, tokenize
from trillium_moe.data.sources import Source, make_source, order0_entropy
from trillium_moe.data.tokenizer import SPECIALS, BPETokenizer, ByteTokenizer, Tokenizer, make_tokenizer

__all__ = [
    "SPECIALS", "BPETokenizer", "BatchIterator", "ByteTokenizer", "ConcatRows", "Documents", "FirstFitRows", "Pipeline",
    "Source", "Tokenizer", "load_documents", "make_pipeline", "make_source", "make_tokenizer", "order0_entropy",
    "tokenize",
]
