{{/* Rules that gateways and workers share. */}}

{{- define "paddock.dnsEgress" -}}
- ports: [{protocol: UDP, port: 53}, {protocol: TCP, port: 53}]
{{- end -}}

{{- define "paddock.redisEgress" -}}
{{- if .Values.redis.bundled -}}
- to:
    - podSelector:
        matchLabels: {{ include "paddock.selector" (dict "root" . "component" "redis") | nindent 10 }}
  ports: [{protocol: TCP, port: 6379}]
{{- else -}}
- ports:
    {{- range .Values.redis.external.ports }}
    - {protocol: TCP, port: {{ . }}}
    {{- end }}
{{- end -}}
{{- end -}}
