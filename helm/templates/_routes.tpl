{{/*
What callers reach from outside. Not what is for operators and probes: /metrics, /ready, /health/drain, /admin.
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
{{- end -}}

{{/* No answer, whole or streamed, takes longer. */}}
{{- define "paddock.longestS" -}}
{{- add (include "paddock.requestTimeout" .) 30 -}}
{{- end -}}
