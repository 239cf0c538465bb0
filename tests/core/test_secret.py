"""The run's secret: where it comes from, who may read it, and signatures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.core.secret import ForgedError, Secret, read_secret, run_secret

SECRET = Secret(b"0123456789abcdef")


def test_signature_is_valid_for_one_purpose() -> None:
    signed = SECRET.sign(b"content", "key 1")
    assert SECRET.check(signed, "key 1") == b"content"
    for message, purpose in ((signed, "key 2"), (signed + b"x", "key 1"), (b"content", "key 1"), (b"", "key 1")):
        with pytest.raises(ForgedError, match=f"^{purpose} was not written by a worker of this run"):
            SECRET.check(message, purpose)
    with pytest.raises(ForgedError):
        Secret(b"another secret..").check(signed, "key 1")


def test_names_depend_on_the_secret() -> None:
    assert SECRET.name("store") == Secret(b"0123456789abcdef").name("store")
    assert len({SECRET.name("store"), SECRET.name("other"), Secret(b"another secret..").name("store")}) == 3


def test_secret_from_a_file_or_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o600)
    for variable in ("PACELINE_SECRET_FILE", "PACELINE_SECRET"):
        monkeypatch.delenv(variable, raising=False)
    assert run_secret() is None
    for variable, value in (("PACELINE_SECRET", "0123456789abcdef"), ("PACELINE_SECRET_FILE", str(path))):
        monkeypatch.setenv(variable, value)
        found = run_secret()
        assert found is not None
        assert found.name("x") == SECRET.name("x")


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620, 0o602])
def test_file_accessible_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef")
    path.chmod(mode)
    with pytest.raises(ValueError, match=f"has mode 0{mode:o} and owner {os.geteuid()}: others could .*chmod 600"):
        read_secret(path)


def test_short_and_missing_secrets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^the secret file .*/none cannot be read: No such file"):
        read_secret(tmp_path / "none")
    path = tmp_path / "secret"
    path.write_text("short")
    path.chmod(0o600)
    with pytest.raises(ValueError, match=r"the secret in .* has 5 bytes: use at least 16, for example from `openssl"):
        read_secret(path)
