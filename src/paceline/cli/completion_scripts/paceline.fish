# paceline completion for fish
set -g __paceline_commands @paths@
function __paceline_at
    set -l at ''
    for word in (commandline -opc)[2..-1]
        set -l longer (string trim -- "$at $word")
        contains -- $longer $__paceline_commands; and set at $longer
    end
    test "$at" = "$argv[1]"
end
@completions@
