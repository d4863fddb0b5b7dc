{{/* Parts that pods have in common. */}}

{{- define "paddock.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "paddock.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* What every pod begins with. */}}
{{- define "paddock.podStart" -}}
serviceAccountName: {{ include "paddock.serviceAccount" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .pod.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Over nodes and zones, as far as that goes. Takes pod and selector (YAML). */}}
{{- define "paddock.spread" -}}
{{- if or .pod.topologySpreadConstraints .pod.spread -}}
topologySpreadConstraints:
{{- with .pod.topologySpreadConstraints }}
{{ toYaml . | indent 2 }}
{{- else }}
{{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{ $.selector | nindent 8 }}
{{- end }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* Takes settings: a map of Paddock's setting names. Kubernetes reads `$$` in a variable as `$`, and `$(X)` as X's value. */}}
{{- define "paddock.settingsEnv" -}}
{{- range $name, $value := .settings }}
{{- if not (kindIs "invalid" $value) }}
- name: PADDOCK_{{ upper $name }}
  value: {{ ternary $value (mustToRawJson $value) (kindIs "string" $value) | replace "$" "$$" | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Redis and secrets. Takes root and role: `gateway`, `worker`, or `accounts`, which logs in to Redis as gateways do. */}}
{{- define "paddock.sharedEnv" -}}
{{- $user := ternary "worker" "gateway" (eq .role "worker") }}
- name: PADDOCK_STATE_DIR
  value: /var/lib/paddock
- name: PADDOCK_LOG_FORMAT
  value: json
{{- $external := .root.Values.redis.external }}
{{- if .root.Values.redis.bundled }}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "paddock.secret" .root }}, key: redis-{{ $user }}-password}}
- name: PADDOCK_REDIS_URL
  value: redis://paddock-{{ $user }}:$(REDIS_PASSWORD)@{{ include "paddock.fullname" .root }}-redis:6379/0
{{- else if $external.url }}
- name: PADDOCK_REDIS_URL
  value: {{ $external.url | quote }}
{{- else }}
{{- $own := and (eq .role "worker") $external.workersOwnUrl }}
- name: PADDOCK_REDIS_URL
  valueFrom: {secretKeyRef: {name: {{ default .root.Values.secrets.existingSecret $external.existingSecret }}, key: {{ ternary "redis-worker-url" "redis-url" $own }}}}
{{- end }}
{{- if ne .role "accounts" }}
- name: PADDOCK_WORKER_SECRET
  valueFrom: {secretKeyRef: {name: {{ include "paddock.secret" .root }}, key: worker-secret}}
{{- end }}
{{- if ne .role "worker" }}
- name: PADDOCK_GATEWAY_SECRET
  valueFrom: {secretKeyRef: {name: {{ include "paddock.secret" .root }}, key: gateway-secret}}
{{- if include "paddock.hasSecret" (dict "root" .root "key" "oidc" "value" .root.Values.secrets.oidc) }}
- name: PADDOCK_OIDC
  valueFrom: {secretKeyRef: {name: {{ include "paddock.secret" .root }}, key: oidc}}
{{- end }}
{{- end }}
{{- end -}}

{{/* Before SIGTERM: nobody new is sent here, and what runs is finished. Takes part, and flags of `paddock drain`. */}}
{{- define "paddock.preStop" -}}
preStop:
  exec:
    command: [paddock, drain, {{ .part }}{{ range .flags }}, {{ . | quote }}{{ end }}]
{{- end -}}
