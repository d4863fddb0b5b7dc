{{/*
What callers reach from outside. Not what is for operators and probes: /metrics, /ready, /health/drain, and /admin unless
`accounts.exposed` says so.
A path stands for itself and for what lies below it; one that ends in `$` for itself alone.
*/}}
{{- define "paddock.publicPaths" -}}
- /v1
- /chat
- /completion
- /completions
- /infill
- /responses
- /embedding
- /embeddings
- /rerank
- /reranking
- /tokenize
- /detokenize
- /apply-template
- /props
- /slots
- /lora-adapters
- /models
- /audio
- /tools
- /health$
- /healthz$
- /version$
- /openapi.json$
- /docs$
- /ui
{{- if .Values.accounts.enabled }}
- /auth
{{- if .Values.accounts.exposed }}
- /admin
- /key
- /team
- /user
- /spend
{{- end }}
{{- end }}
{{- end -}}

{{/* No answer, whole or streamed, takes longer. */}}
{{- define "paddock.longestS" -}}
{{- add (include "paddock.requestTimeout" .) 30 -}}
{{- end -}}
