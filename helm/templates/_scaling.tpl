{{/* What a model's number of workers follows. */}}

{{/*
A query of one number. 0 where gateways are scraped but none has the series; nothing where none is scraped, which is an
error and not an idle model. Takes root, model, fold (sum or max) and metric.
*/}}
{{- define "paddock.query" -}}
{{- $more := ternary (printf ",%s" .root.Values.keda.matchers) "" (ne .root.Values.keda.matchers "") -}}
{{- $any := ternary (printf "{%s}" .root.Values.keda.matchers) "" (ne .root.Values.keda.matchers "") -}}
{{- printf "%s(%s{model=%q%s}) or 0 * sum(paddock_build_info%s)" .fold .metric .model.name $more $any -}}
{{- end -}}

{{/* Calls in flight per worker, waiting ones included: never fewer workers than these calls need. */}}
{{- define "paddock.inFlightPerWorker" -}}
{{- maxf 1 (mulf (default 8 .slots) .autoscaling.slotShare | floor) -}}
{{- end -}}
{{- define "paddock.waitingPerWorker" -}}
{{- default (max 1 (div (default 8 .slots) 2)) .autoscaling.waiting -}}
{{- end -}}

{{/* New workers come quickly, at most as many again in half a minute; they leave one by one. */}}
{{- define "paddock.behavior" -}}
scaleUp:
  stabilizationWindowSeconds: 0
  selectPolicy: Max
  policies:
    - {type: Pods, value: 2, periodSeconds: 30}
    - {type: Percent, value: 100, periodSeconds: 30}
scaleDown:
  stabilizationWindowSeconds: {{ .scaleDownS }}
  policies:
    - {type: Pods, value: 1, periodSeconds: 60}
{{- end -}}

{{- define "paddock.trigger" -}}
- type: prometheus
  name: {{ .name }}
  metricType: {{ .type }}
  metadata:
    serverAddress: {{ .root.Values.keda.prometheusAddress | quote }}
    query: {{ include "paddock.query" . | quote }}
    threshold: {{ .threshold | quote }}
    activationThreshold: {{ .activation | quote }}
    ignoreNullValues: "false"
    {{- with .root.Values.keda.authModes }}
    authModes: {{ . | quote }}
    {{- end }}
  {{- with .root.Values.keda.authenticationRef }}
  authenticationRef:
    name: {{ . }}
  {{- end }}
{{- end -}}
