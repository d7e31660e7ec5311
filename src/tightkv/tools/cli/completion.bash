_tightkv() {
  local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"
  local path="" longer word words="" i
  for ((i = 1; i < COMP_CWORD; i++)); do
    word="${COMP_WORDS[i]}"; longer="${path:+$path }$word"
    case "$longer" in @PATHS@) path="$longer" ;; esac
  done
  case "${path:+$path }$before" in
@OPTIONS@
  esac
  if [[ -z "$words" ]]; then
    case "$path" in
@COMMANDS@
    esac
  fi
  COMPREPLY=( $(compgen -W "$words" -- "$current") )
  if [[ ${#COMPREPLY[@]} -eq 0 ]]; then COMPREPLY=( $(compgen -f -- "$current") ); fi
}
complete -o filenames -F _tightkv tightkv
