#compdef paceline
# paceline completion for zsh
_paceline() {
local previous="${words[CURRENT-1]}" at="" longer
local -a offered
local -i i
for ((i = 2; i < CURRENT; i++)); do
longer="${at:+$at }${words[i]}"
@walk@
done
@values@
if [[ "${words[CURRENT]}" == -* ]]; then
@flags@
else
@words@
@runs@
fi
if (( $#offered )); then
_describe paceline offered
else
_files
fi
}
compdef _paceline paceline
# The first completion reads this file from fpath and expects it to complete.
[[ $funcstack[1] == _paceline ]] && _paceline
