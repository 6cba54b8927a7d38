"""Small tokenizer files: DeepSeek-like, Llama-like and Qwen-like. Chat templates in three styles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

STANDIN = Path("data/standins/tokenizer.json")
BOS, EOS, USER, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<|user|>", "<|end|>"
TEXTS = (
    "Hello, world",
    "  two leading spaces\nand lines\n\n",
    "It's 1_000 or 1e3?",
    "é한국어🙂 e\u0301 \u200d👩\u200d💻",
    f"{USER}hi{END}",
    f"before {BOS} and behind{EOS}",
    "<s>[INST] x </s>",
    "",
)
DEEPSEEK_TEMPLATE = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{{ bos_token }}"
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
QWEN_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PHI_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}"
    "{{'<|system|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}"
    "{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}"
    "{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% else %}"
    "{{ raise_exception('Only system, user and assistant are roles') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
TEMPLATES = {"deepseek": DEEPSEEK_TEMPLATE, "qwen": QWEN_TEMPLATE, "phi": PHI_TEMPLATE}


def byte_level(*special: str, normalizer: Any = None) -> Tokenizer:
    """The stand-ins' merges without their BOS, with other special tokens; ids of these start at 8192."""
    content = json.loads(STANDIN.read_text())
    content |= {"post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False,
                                   "use_regex": True}, "added_tokens": []}  # fmt: skip
    tokenizer = Tokenizer.from_str(json.dumps(content))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return tokenizer


def deepseek_like() -> Tokenizer:
    """Adds no BOS by itself: its post-processor is ByteLevel."""
    return byte_level(BOS, EOS)


def qwen_like() -> Tokenizer:
    return byte_level("<|endoftext|>", "<|im_start|>", "<|im_end|>", normalizer=normalizers.NFC())


def llama_like(adds_bos: bool = True) -> Tokenizer:
    """Metaspace and byte fallback, as sentencepiece files are converted; words are single characters."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    names += [chr(code) for code in range(33, 127)]
    tokenizer = Tokenizer(
        models.BPE(
            {name: index for index, name in enumerate([*names, "▁H"])},
            [("▁", "H")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names[:3]])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    return tokenizer


def write(directory: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    """tokenizer.json and tokenizer_config.json of a checkpoint."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
