"""Data sets, prompts and tokenizers: everything before the first token is sampled.

Must not know: models, roles, tensors.

Importing this package imports neither torch nor transformers nor pyarrow; they come with the first call
that needs them.
"""

from rallypoint.data.answers import AnswerReader, read_answer
from rallypoint.data.chat_text import chat_text
from rallypoint.data.conversations import Conversation, Conversations, NamedExample, load_conversations
from rallypoint.data.dataset import Dataset, Example, JSONValue, load_dataset
from rallypoint.data.dialogue import Dialogue
from rallypoint.data.digits import DigitsTask, make_digits, score_digits
from rallypoint.data.encoded_rows import EncodedExample, EncodedRows
from rallypoint.data.generators import Generator, is_generator
from rallypoint.data.legible import Legibility
from rallypoint.data.locate import DataSet, check_dataset_path
from rallypoint.data.messages import ChatMessage, Message, whole_text
from rallypoint.data.prompts import EncodedPrompts, encode_legible, encode_prompts, texts_of
from rallypoint.data.rows import encode_rows
from rallypoint.data.stream import Mixture, PromptStream
from rallypoint.data.template import TemplateProbe, special_ids
from rallypoint.data.tokenizer import decoder, load_tokenizer, make_digits_tokenizer, save_tokenizer
from rallypoint.data.windows import RowStream, StreamedPrompts, StreamedRows, Windows

__all__ = [
    "AnswerReader",
    "ChatMessage",
    "Conversation",
    "Conversations",
    "DataSet",
    "Dataset",
    "Dialogue",
    "DigitsTask",
    "EncodedExample",
    "EncodedPrompts",
    "EncodedRows",
    "Example",
    "Generator",
    "JSONValue",
    "Legibility",
    "Message",
    "Mixture",
    "NamedExample",
    "PromptStream",
    "RowStream",
    "StreamedPrompts",
    "StreamedRows",
    "TemplateProbe",
    "Windows",
    "chat_text",
    "check_dataset_path",
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
    "read_answer",
    "save_tokenizer",
    "score_digits",
    "special_ids",
    "texts_of",
    "whole_text",
]
