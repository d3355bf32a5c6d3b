"""Data sets, prompts and tokenizers: everything before the first token is sampled.

Must not know: models, roles, tensors.

Importing this package imports neither torch nor transformers nor pyarrow; they come with the first call
that needs them.
"""

from rallypoint.data.answers import AnswerReader
from rallypoint.data.chat_text import chat_text
from rallypoint.data.conversations import Conversations, load_conversations
from rallypoint.data.dataset import Example, load_dataset
from rallypoint.data.dialogue import Dialogue
from rallypoint.data.digits import make_digits
from rallypoint.data.encoded_rows import EncodedRows
from rallypoint.data.generators import Generator, is_generator
from rallypoint.data.legible import Legibility
from rallypoint.data.locate import DataSet
from rallypoint.data.messages import ChatMessage, Message, whole_text
from rallypoint.data.prompts import EncodedPrompts, encode_legible, encode_prompts, texts_of
from rallypoint.data.rows import encode_rows
from rallypoint.data.stream import PromptStream
from rallypoint.data.template import TemplateProbe, special_ids
from rallypoint.data.tokenizer import decoder, load_tokenizer, make_digits_tokenizer, save_tokenizer
from rallypoint.data.windows import RowStream, StreamedPrompts, StreamedRows

__all__ = [
    "AnswerReader",
    "ChatMessage",
    "Conversations",
    "DataSet",
    "Dialogue",
    "EncodedPrompts",
    "EncodedRows",
    "Example",
    "Generator",
    "Legibility",
    "Message",
    "PromptStream",
    "RowStream",
    "StreamedPrompts",
    "StreamedRows",
    "TemplateProbe",
    "chat_text",
    "decoder",
    "encode_legible",
    "encode_prompts",
    "encode_rows",
    "is_generator",
    "load_conversations",
    "load_dataset",
    "load_tokenizer",
    "make_digits",
    "make_digits_tokenizer",
    "save_tokenizer",
    "special_ids",
    "texts_of",
    "whole_text",
]
