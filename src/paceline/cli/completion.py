"""`paceline completion`: shell scripts that complete commands, options, their values and the names of runs.

A script is generated from the parser once and is self-contained: calling paceline for each completion would import
torch every time.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from paceline.cli.commands import add_command
from paceline.observe.run_files import RUNS_FOLDER

# Arguments with these metavars are completed with the names of runs.
_RUN_METAVARS = ("RUN", "CKPT")

_NOTE = """\
Save the script where your shell looks for completions:

  bash   ~/.local/share/bash-completion/completions/paceline
  zsh    a folder of your fpath, as _paceline
  fish   ~/.config/fish/completions/paceline.fish

example:
  paceline completion bash > paceline.bash && source paceline.bash
  paceline completion zsh > "${fpath[1]}/_paceline"
  paceline completion fish > ~/.config/fish/completions/paceline.fish
"""


@dataclass
class _Command:
    """`path`: the words that lead to the command, such as "runs save"; empty for the program.

    `words` may follow it, `flags` are its options, both with descriptions. `values`: by option, the words that may
    follow the option; empty if anything may, such as a file.
    """

    path: str
    words: dict[str, str] = field(default_factory=dict)
    flags: dict[str, str] = field(default_factory=dict)
    values: dict[str, list[str]] = field(default_factory=dict)
    takes_run: bool = False


def add_parser(commands: Any) -> None:
    parser = add_command(commands, "completion", "print a completion script for a shell", _NOTE, run=_completion)
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish")


def _completion(options: argparse.Namespace) -> None:
    from paceline.cli.main import make_parser

    print(script(make_parser(), options.shell), end="")


def script(root: argparse.ArgumentParser, shell: str) -> str:
    """The script in `completion_scripts` with its generated parts, which the script names as @placeholders@."""
    text = files("paceline.cli").joinpath("completion_scripts", f"paceline.{shell}").read_text(encoding="utf-8")
    commands = list(_commands(root))
    parts = _fish(commands) if shell == "fish" else _cases(commands, shell)
    for name, part in parts.items():
        text = text.replace(f"@{name}@", part)
    return text


def _commands(parser: argparse.ArgumentParser, path: str = "") -> Iterator[_Command]:
    """The parser's command, and all commands below it."""
    command = _Command(path)
    children: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        choices = list(map(str, action.choices or ()))
        if isinstance(action, argparse._SubParsersAction):
            command.words |= {choice.dest: choice.help or "" for choice in action._choices_actions}
            children |= action.choices
        elif action.option_strings:
            what = " ".join(((action.help or "") % vars(action)).split())
            command.flags |= dict.fromkeys(action.option_strings, what)
            command.values |= dict.fromkeys(action.option_strings, choices) if action.nargs != 0 else {}
        else:
            command.words |= dict.fromkeys(choices, "")
            command.takes_run |= action.metavar in _RUN_METAVARS
    yield command
    for name, child in children.items():
        yield from _commands(child, f"{path} {name}".strip())


# How bash and zsh offer words with descriptions, the names of runs, and the values of an option.
_SHELLS: dict[str, tuple[Callable[[dict[str, str]], str], str, Callable[[list[str]], str]]] = {
    "bash": (
        lambda words: f"offered={shlex.quote(' '.join(words))}",
        f'offered="$(command ls {RUNS_FOLDER} 2> /dev/null)"',
        lambda values: f"offered={shlex.quote(' '.join(values))}",
    ),
    "zsh": (
        lambda words: f"offered=({shlex.join(f'{word}:{what}' for word, what in words.items())})",
        f"compadd -- {RUNS_FOLDER}/*(N:t)",
        lambda values: f"compadd -- {shlex.join(values)}; return" if values else "_files; return",
    ),
}


def _cases(commands: list[_Command], shell: str) -> dict[str, str]:
    """The `case` statements by which bash and zsh find the command and the words that may follow."""
    offer, offer_runs, offer_values = _SHELLS[shell]
    values = {f"{c.path} {name}": offer_values(values) for c in commands for name, values in c.values.items()}
    return {
        "walk": _case("$longer", {c.path: 'at="$longer"' for c in commands if c.path}),
        "flags": _case("$at", {c.path: offer(c.flags) for c in commands}),
        "words": _case("$at", {c.path: offer(c.words) for c in commands if c.words}),
        "runs": _case("$at", {c.path: offer_runs for c in commands if c.takes_run}),
        "values": _case("$at $previous", values),
    }


def _case(subject: str, branches: dict[str, str]) -> str:
    lines = (f"({shlex.quote(word)}) {action} ;;" for word, action in branches.items())
    return "\n".join([f'case "{subject}" in', *lines, "esac"])


def _fish(commands: list[_Command]) -> dict[str, str]:
    def quoted(text: str) -> str:
        escaped = text.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"

    lines = []
    for command in commands:
        condition = f'__paceline_at "{command.path}"'
        start = f"complete -c paceline -n {quoted(condition)}"
        lines += [f"{start} -f -a {quoted(word)} -d {quoted(what)}" for word, what in command.words.items()]
        if command.takes_run:
            lines.append(f"{start} -a '(command ls {RUNS_FOLDER} 2> /dev/null)'")
        for name, what in command.flags.items():
            flag = f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
            if (values := command.values.get(name)) is not None:
                flag += f" -x -a {quoted(' '.join(values))}" if values else " -r"
            lines.append(f"{start} {flag} -d {quoted(what)}")
    paths = " ".join(quoted(command.path) for command in commands if command.path)
    return {"paths": paths, "completions": "\n".join(lines)}
