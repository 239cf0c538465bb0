"""`paceline completion`: scripts that let a shell complete commands, options and their values.

They are written from the parser, once, and know everything by themselves: asking paceline at every press of the key
would take as long as importing torch.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from paceline.cli.commands import add_command
from paceline.observe.run_files import RUNS_FOLDER

SHELLS = ("bash", "zsh", "fish")
# What stands in help texts for the name of a run, or of what one has.
_RUN_METAVARS = ("RUN", "CKPT")

_EXAMPLE = """\
Have your shell read the script when it starts:

  bash   put it into ~/.local/share/bash-completion/completions/paceline
  zsh    put it into a folder of your fpath, as _paceline
  fish   put it into ~/.config/fish/completions/paceline.fish

example:
  paceline completion bash > paceline.bash && source paceline.bash
  paceline completion zsh > "${fpath[1]}/_paceline"
  paceline completion fish > ~/.config/fish/completions/paceline.fish
"""


@dataclass(frozen=True)
class Option:
    """`values`: the words that may follow it, empty if that is anything, such as a file; None if nothing follows."""

    names: tuple[str, ...]
    what: str
    values: tuple[str, ...] | None


@dataclass(frozen=True)
class Command:
    """`path`: the words that lead to it, such as "runs save"; empty for the program itself.

    `words`: what may follow, with a description each; none where that is a file. `takes_run`: a run's name may, too.
    """

    path: str
    words: dict[str, str]
    options: tuple[Option, ...]
    takes_run: bool


def add_parser(commands: Any, root: argparse.ArgumentParser) -> None:
    """Add `completion` to the commands of `root`, about which it writes as they are when it is called."""
    parser = add_command(commands, "completion", "print a script that completes commands in a shell", _EXAMPLE)
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")
    parser.set_defaults(run=partial(_completion, root))


def _completion(root: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    print(script(root, options.shell), end="")
    return 0


def script(root: argparse.ArgumentParser, shell: str) -> str:
    """The completion script of one of `SHELLS` for the commands of a parser."""
    write = {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]
    return write(list(commands_of(root)))


def commands_of(parser: argparse.ArgumentParser, path: str = "") -> Iterator[Command]:
    """The parser's own command and all below it."""
    words: dict[str, str] = {}
    options = []
    takes_run = False
    below: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            words |= {choice.dest: choice.help or "" for choice in action._choices_actions}
            below |= action.choices
        elif action.option_strings:
            options.append(_option(action))
        else:
            words |= {str(choice): "" for choice in action.choices or ()}
            takes_run |= action.metavar in _RUN_METAVARS
    yield Command(path, words, tuple(options), takes_run)
    for name, child in below.items():
        yield from commands_of(child, f"{path} {name}".strip())


def _option(action: argparse.Action) -> Option:
    values = None if action.nargs == 0 else tuple(map(str, action.choices or ()))
    # "default: %(default)s" and the like, and descriptions that go on over lines.
    what = " ".join(((action.help or "") % vars(action)).split())
    return Option(tuple(action.option_strings), what, values)


def _bash(commands: list[Command]) -> str:
    def offer(words: Iterable[str]) -> str:
        return f"offered={shlex.quote(' '.join(words))}"

    offer_runs = f'offered="$(command ls {RUNS_FOLDER} 2> /dev/null)"'
    walk = _case("$longer", {c.path: 'at="$longer"' for c in commands if c.path})
    flags = _case("$at", {c.path: offer(name for name, _ in _flags(c)) for c in commands})
    words = _case("$at", {c.path: offer(c.words) for c in commands if c.words})
    runs = _case("$at", {c.path: offer_runs for c in commands if c.takes_run})
    values = _case("$at ${COMP_WORDS[COMP_CWORD-1]}", {place: offer(values) for place, values in _values(commands)})
    return f"""\
# paceline completion for bash
_paceline() {{
local current="${{COMP_WORDS[COMP_CWORD]}}" at="" longer offered="" i
for ((i = 1; i < COMP_CWORD; i++)); do
longer="${{at:+$at }}${{COMP_WORDS[i]}}"
{walk}
done
if [[ $current == -* ]]; then
{flags}
else
{words}
{runs}
fi
{values}
COMPREPLY=($(compgen -W "$offered" -- "$current"))
}}
complete -o bashdefault -o default -F _paceline paceline
"""


def _zsh(commands: list[Command]) -> str:
    def offer(words: Iterable[tuple[str, str]]) -> str:
        return f"offered=({shlex.join(f'{word}:{what}' for word, what in words)})"

    def offer_values(values: tuple[str, ...]) -> str:
        return f"compadd -- {shlex.join(values)}; return" if values else "_files; return"

    walk = _case("$longer", {c.path: 'at="$longer"' for c in commands if c.path})
    flags = _case("$at", {c.path: offer(_flags(c)) for c in commands})
    words = _case("$at", {c.path: offer(c.words.items()) for c in commands if c.words})
    runs = _case("$at", {c.path: f"compadd -- {RUNS_FOLDER}/*(N:t)" for c in commands if c.takes_run})
    values = _case("$at ${words[CURRENT-1]}", {place: offer_values(values) for place, values in _values(commands)})
    return f"""\
#compdef paceline
# paceline completion for zsh
_paceline() {{
local at="" longer
local -a offered
local -i i
for ((i = 2; i < CURRENT; i++)); do
longer="${{at:+$at }}${{words[i]}}"
{walk}
done
{values}
if [[ "${{words[CURRENT]}}" == -* ]]; then
{flags}
else
{words}
{runs}
fi
if (( $#offered )); then
_describe paceline offered
else
_files
fi
}}
compdef _paceline paceline
# Read for the first completion, from fpath: this is it.
[[ $funcstack[1] == _paceline ]] && _paceline
"""


def _case(subject: str, branches: dict[str, str]) -> str:
    """A `case` of bash and zsh, which takes what is written for the word that `subject` is."""
    lines = (f"({shlex.quote(word)}) {action} ;;" for word, action in branches.items())
    return "\n".join([f'case "{subject}" in', *lines, "esac"])


def _flags(command: Command) -> list[tuple[str, str]]:
    """The names of its options, with a description each."""
    return [(name, option.what) for option in command.options for name in option.names]


def _values(commands: list[Command]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Where a value stands, "runs save --timeout", and the words it may be."""
    for command in commands:
        for option in command.options:
            if option.values is not None:
                yield from ((f"{command.path} {name}", option.values) for name in option.names)


def _fish(commands: list[Command]) -> str:
    lines = [
        "# paceline completion for fish",
        f"set -g __paceline_commands {' '.join(_quoted(c.path) for c in commands if c.path)}",
        "function __paceline_at",
        "    set -l at ''",
        "    for word in (commandline -opc)[2..-1]",
        '        set -l longer (string trim -- "$at $word")',
        "        contains -- $longer $__paceline_commands; and set at $longer",
        "    end",
        '    test "$at" = "$argv[1]"',
        "end",
    ]
    for command in commands:
        condition = f'__paceline_at "{command.path}"'
        start = f"complete -c paceline -n {_quoted(condition)}"
        lines += [f"{start} -f -a {_quoted(word)} -d {_quoted(what)}" for word, what in command.words.items()]
        if command.takes_run:
            lines.append(f"{start} -a '(command ls {RUNS_FOLDER} 2> /dev/null)'")
        lines += [f"{start} {_fish_option(option)} -d {_quoted(option.what)}" for option in command.options]
    return "\n".join(lines) + "\n"


def _fish_option(option: Option) -> str:
    names = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names]
    if option.values is None:
        return " ".join(names)
    return " ".join([*names, f"-x -a {_quoted(' '.join(option.values))}" if option.values else "-r"])


def _quoted(text: str) -> str:
    """As fish reads it."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
