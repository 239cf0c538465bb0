# paceline completion for bash
_paceline() {
local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" at="" longer offered="" i
for ((i = 1; i < COMP_CWORD; i++)); do
longer="${at:+$at }${COMP_WORDS[i]}"
@walk@
done
if [[ $current == -* ]]; then
@flags@
else
@words@
@runs@
fi
@values@
COMPREPLY=($(compgen -W "$offered" -- "$current"))
}
complete -o bashdefault -o default -F _paceline paceline
