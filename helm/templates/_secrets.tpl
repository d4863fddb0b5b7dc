{{/* The Secret of gateways and workers. */}}

{{- define "paddock.secret" -}}
{{- default (include "paddock.fullname" .) .Values.secrets.existingSecret -}}
{{- end -}}

{{/* Whether the Secret has an optional key. Takes root, key and value: what the chart's own would hold. */}}
{{- define "paddock.hasSecret" -}}
{{- if .root.Values.secrets.existingSecret -}}
{{- if has .key .root.Values.secrets.existingSecretHolds -}}yes{{- end -}}
{{- else if .value -}}yes{{- end -}}
{{- end -}}

{{/*
A value of the chart's Secret: what is given, else what the cluster has, else a new one. An upgrade never makes a new
one: gateways and workers of before would not know it.
*/}}
{{- define "paddock.kept" -}}
{{- $old := (lookup "v1" "Secret" .root.Release.Namespace (include "paddock.fullname" .root)) -}}
{{- $data := default dict (get (default dict $old) "data") -}}
{{- if .value -}}
{{- .value -}}
{{- else if hasKey $data .key -}}
{{- get $data .key | b64dec -}}
{{- else if and .root.Release.IsUpgrade (not $data) -}}
{{- fail (printf "the Secret %s of this release can't be read, so an upgrade would make new keys: render with access to the cluster (`--dry-run=server`), or name your own Secret in secrets.existingSecret" (include "paddock.fullname" .root)) -}}
{{- else -}}
{{- printf "%s%s" .prefix (randAlphaNum 40) -}}
{{- end -}}
{{- end -}}
