import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.tokenizer import Tokenizer
from services.types.errors import ErrorCode, WealdError

Write = Callable[..., Path]

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
EOS = {"eos_token_id": 7}
USER = [{"role": "user", "content": "Why 🌲?"}]


def rendered(directory: Path, messages: list[dict[str, str]] = USER) -> str:
    tokenizer = Tokenizer.load(directory)
    return tokenizer.decode(tokenizer.chat(messages), skip_special=False)


def refusal(action: Callable[[], object]) -> WealdError:
    with pytest.raises(WealdError) as raised:
        action()
    return raised.value


def test_a_text_survives_encoding_and_decoding(write: Write) -> None:
    tokenizer = Tokenizer.load(write(config=EOS))
    text = "the 日本 of  👩‍🌾\n<think>"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_added_on_request_and_skipped_in_text(write: Write) -> None:
    tokenizer = Tokenizer.load(write(config=EOS))
    bos, *rest = tokenizer.encode("the")
    assert rest == tokenizer.encode("the", special=False)
    assert bos in tokenizer.special_ids
    assert tokenizer.decode([bos, *rest]) == "the"
    assert tokenizer.decode([bos, *rest], skip_special=False) == "<|bos|>the"
    assert not tokenizer.has_text(bos)
    assert not tokenizer.has_text(tokenizer.vocab_size)
    assert all(map(tokenizer.has_text, rest))


@given(data=st.data())
def test_the_bytes_of_tokens_make_up_their_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2)))
    known = [token for token in tokens if tokenizer.has_text(token)]
    assert all(tokenizer.bytes_of(token) is None for token in tokens if token not in known)
    word = next(token for token in range(300) if tokenizer.decode([token]).isalpha())
    made = b"".join(tokenizer.bytes_of(token) or b"" for token in [word, *known]).decode(errors="replace")
    text = tokenizer.decode([word, *tokens])
    if tokenizer.byte_ids and "\ufffd" in text:
        # One bad byte spoils its whole run.
        assert "\ufffd" in made
    elif "'" in text:
        # WordPiece takes the space away where some two tokens meet.
        assert made.replace(" ", "") == text.replace(" ", "")
    else:
        assert made.removeprefix(" ") == text


@pytest.mark.parametrize("checkpoint", ["byte_level", "byte_fallback"], indirect=True)
def test_a_character_of_several_tokens_is_made_of_their_bytes(tokenizer: Tokenizer) -> None:
    tokens = [token for token in tokenizer.encode("🐟") if tokenizer.bytes_of(token) not in (None, b" ")]
    assert len(tokens) > 1
    assert b"".join(tokenizer.bytes_of(token) or b"" for token in tokens) == "🐟".encode()


@pytest.mark.parametrize("checkpoint", ["metaspace"], indirect=True)
def test_a_token_that_begins_a_word_has_its_space(tokenizer: Tokenizer) -> None:
    assert tokenizer.bytes_of(tokenizer.encode("of the")[-1]) == b" the"


def test_truncation_and_padding_in_the_file_are_ignored(write: Write) -> None:
    directory = write(config=EOS)
    core = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    core.enable_truncation(2)
    core.enable_padding(length=1000)
    long = "the forest of the trees"
    expected = Tokenizer.load(directory).encode(long)
    core.save(str(directory / "tokenizer.json"))
    assert Tokenizer.load(directory).encode(long) == expected


def test_half_a_surrogate_pair_is_refused(write: Write) -> None:
    tokenizer = Tokenizer.load(write(config=EOS))
    assert refusal(lambda: tokenizer.encode("a\ud83c")).code is ErrorCode.INVALID_ARGUMENT


def test_a_conversation_becomes_chatml(write: Write) -> None:
    directory = write(config=EOS, tokenizer_config={"chat_template": CHATML})
    messages = [{"role": "system", "content": "Be brief. "}, *USER]
    text = (
        "<|im_start|>system\nBe brief. <|im_end|>\n"
        "<|im_start|>user\nWhy 🌲?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert rendered(directory, messages) == text
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.chat(messages) == tokenizer.encode(text, special=False)
    assert sum(token in tokenizer.special_ids for token in tokenizer.chat(messages)) == 5


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ bos_token }}|{{ eos_token }}|{{ pad_token is defined }}", "<|bos|>|<|im_end|>|False"),
        ("{{ tools is none }}{{ documents is none }}", "TrueTrue"),
        ("  {% if true %}\nyes\n  {% endif %}\n", "yes\n"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Why 🌲?"}]'),
        ("{{ {'b': '<', 'a': 1} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 1,\n "b": "<"\n}'),
        ("{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x is defined }}", "1False"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
    ],
)
def test_templates_find_the_environment_they_were_written_for(write: Write, template: str, text: str) -> None:
    named = {
        "bos_token": "<|bos|>",
        "eos_token": {"content": "<|im_end|>", "special": True},
        "pad_token": None,
    }
    assert rendered(write(config=EOS, tokenizer_config={"chat_template": template, **named})) == text


def test_templates_can_ask_for_the_date(write: Write) -> None:
    directory = write(config=EOS, tokenizer_config={"chat_template": "{{ strftime_now('%Y') }}"})
    before = datetime.now().year
    assert before <= int(rendered(directory)) <= datetime.now().year


def test_a_template_file_beats_the_one_in_the_configuration(write: Write) -> None:
    directory = write(config=EOS, tokenizer_config={"chat_template": "old"})
    (directory / "chat_template.jinja").write_text("new", encoding="utf-8")
    assert rendered(directory) == "new"


def test_of_several_templates_the_default_one_is_used(write: Write) -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert rendered(write(config=EOS, tokenizer_config={"chat_template": templates})) == "plain"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[1].content.strip() }}",
        "{{ 1 + messages }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 // (messages | length - 1) }}",
    ],
)
def test_what_a_template_refuses_is_the_callers_error(write: Write, template: str) -> None:
    tokenizer = Tokenizer.load(write(config=EOS, tokenizer_config={"chat_template": template}))
    assert refusal(lambda: tokenizer.chat(USER)).code is ErrorCode.INVALID_ARGUMENT


def test_an_empty_conversation_is_refused(write: Write) -> None:
    tokenizer = Tokenizer.load(write(config=EOS, tokenizer_config={"chat_template": CHATML}))
    assert refusal(lambda: tokenizer.chat([])).code is ErrorCode.INVALID_ARGUMENT


def test_a_model_without_a_template_points_to_plain_prompts(write: Write) -> None:
    error = refusal(lambda: Tokenizer.load(write(config=EOS)).chat(USER))
    assert error.code is ErrorCode.INVALID_ARGUMENT
    assert "/v1/completions" in error.message
    assert "--prompt" in error.message


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config": {"eos_token_id": 3}}, {3}),
        ({"config": {"eos_token_id": 3}, "generation_config": {"eos_token_id": [4, 0]}}, {4, 0}),
        ({"config": {"eos_token_id": 3}, "generation_config": {}}, {3}),
    ],
)
def test_the_generation_settings_name_the_end_of_the_text(
    write: Write, files: dict[str, object], expected: set[int]
) -> None:
    assert Tokenizer.load(write(**files)).eos_token_ids == expected


def test_the_tokenizers_own_end_token_is_the_last_resort(write: Write) -> None:
    tokenizer = Tokenizer.load(write(config={}, tokenizer_config={"eos_token": "<|im_end|>"}))
    assert tokenizer.decode(list(tokenizer.eos_token_ids), skip_special=False) == "<|im_end|>"


@pytest.mark.parametrize(
    ("name", "content", "mention"),
    [
        ("tokenizer.json", None, "is missing"),
        ("tokenizer.json", "{}", "cannot be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not a JSON object"),
        ("config.json", "7", "config.json is not a JSON object"),
        ("config.json", None, "eos_token_id"),
        ("chat_template.jinja", "{% if %}", "chat template"),
    ],
)
def test_what_is_wrong_with_a_checkpoint_is_named(
    write: Write, name: str, content: str | None, mention: str
) -> None:
    directory = write(config=EOS)
    if content is None:
        (directory / name).unlink()
    else:
        (directory / name).write_text(content, encoding="utf-8")
    error = refusal(lambda: Tokenizer.load(directory))
    assert error.code is ErrorCode.INCOMPATIBLE_CHECKPOINT
    assert mention in error.message


def test_the_text_layer_starts_without_torch_and_transformers() -> None:
    program = (
        "import sys, services.gateway.answers;"
        "sys.exit(bool({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
