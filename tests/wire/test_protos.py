"""The wire contract itself: its style, the code generated from it, what may change."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def check(root: Path) -> subprocess.CompletedProcess[str]:
    """What `scripts/protos --check` says in a checkout."""
    command = [sys.executable, root / "scripts" / "protos", "--check"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository whose main has the contract as it stands here, with a branch checked out."""
    for part in ("protos", "scripts"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    for step in (
        ("init", "-q", "-b", "main"),
        ("add", "-A"),
        (*who, "commit", "-qm", "contract"),
        ("checkout", "-qb", "change"),
    ):
        subprocess.run(["git", *step], cwd=tmp_path, check=True)
    return tmp_path


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_the_contract_is_in_order_and_the_generated_code_has_not_drifted() -> None:
    finished = check(ROOT)
    assert finished.returncode == 0, finished.stderr


def test_drift_is_found(checkout: Path) -> None:
    assert check(checkout).returncode == 0
    edit(checkout / "protos/weald/v1/verify.proto", "string traceparent = 10;", "string trace = 10;")
    (checkout / "protos/weald/v1/old_pb2.py").touch()
    said = check(checkout).stderr
    for file in ("verify_pb2.py", "verify_pb2.pyi", "old_pb2.py"):
        assert f"protos/weald/v1/{file} is not what the protos generate; run scripts/protos" in said
    assert "draft_pb2" not in said


def test_a_field_without_a_comment_is_found(checkout: Path) -> None:
    edit(checkout / "protos/weald/v1/session.proto", "  // Sessions that take part in target steps.\n", "")
    assert 'Field "running" should have a non-empty comment' in check(checkout).stderr


def test_a_change_that_replicas_built_from_main_would_misread_is_found(checkout: Path) -> None:
    edit(
        checkout / "protos/weald/v1/verify.proto", "repeated bool wanted = 11", "repeated string wanted = 11"
    )
    subprocess.run([sys.executable, checkout / "scripts" / "protos"], check=True)
    finished = check(checkout)
    assert finished.returncode == 1
    assert 'with name "wanted" on message "Replies" changed type from "bool" to "string"' in finished.stderr
    subprocess.run(["git", "branch", "-qD", "main"], cwd=checkout, check=True)
    finished = check(checkout)
    assert finished.returncode == 0
    assert "nothing to compare the wire contract with" in finished.stdout
