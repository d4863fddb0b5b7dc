{{/* The pod of a model's worker. Takes root and model. */}}

{{- define "paddock.workerEnv" -}}
{{- $model := .model -}}
{{- $settings := merge (dict "worker_drain_s" (include "paddock.workerDrain" . | int)) (omit $model.settings "worker_drain_s") -}}
{{- with include "paddock.promptMib" $model.promptCache -}}{{- $settings = merge $settings (dict "cache_disk_mib" (int .)) -}}{{- end -}}
{{- include "paddock.sharedEnv" (dict "root" .root "role" "worker") }}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: PADDOCK_WORKER_ID
  value: $(POD_NAME)
- name: PADDOCK_WORKER_HOST
  value: {{ ternary "::" "0.0.0.0" .root.Values.ipv6 | quote }}
- name: PADDOCK_WORKER_PORT
  value: "8081"
- name: PADDOCK_WORKER_ADDRESS
  value: {{ ternary "http://[$(POD_IP)]:8081" "http://$(POD_IP):8081" .root.Values.ipv6 | quote }}
- name: PADDOCK_BLACK_BOX
  value: /var/lib/paddock/worker.calls
- name: PADDOCK_ALIAS
  value: {{ $model.name | quote }}
- name: PADDOCK_MODEL
  value: {{ include "paddock.modelFile" $model | quote }}
- name: PADDOCK_LLAMA
  value: {{ include "paddock.llama" $model | quote }}
{{- include "paddock.settingsEnv" (dict "settings" (pick $model "slots" "ctx" "kv_tokens" "sampling" "adapters" "speculation" "projector" "projector_on_gpu" "image_min_tokens" "image_max_tokens" "tool_family" "open_objects" "chat_template" "thinking" "thinking_budget" "thinking_budget_message" "chat_template_kwargs" "shared_prompts")) }}
{{- if ne $model.promptCache.type "none" }}
- name: PADDOCK_CACHE_DIR
  value: /cache/{{ include "paddock.slug" $model.name }}
{{- end }}
{{- if include "paddock.hasSecret" (dict "root" .root "key" "cache-secret" "value" "made") }}
- name: PADDOCK_CACHE_SECRET
  valueFrom: {secretKeyRef: {name: {{ include "paddock.secret" .root }}, key: cache-secret}}
{{- end }}
{{- include "paddock.settingsEnv" (dict "settings" $settings) }}
{{- with $model.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Brings the model's file before the worker starts; a file of a volume needs none. */}}
{{- define "paddock.fetchContainer" -}}
{{- $model := .model -}}
- name: fetch
  image: {{ include "paddock.workerImage" . }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  {{- if $model.hf }}
  command: [paddock, models, pull]
  {{- else }}
  command:
    - python
    - -c
    - {{ .root.Files.Get "files/hooks/download.py" | quote }}
    - {{ $model.url | quote }}
    - {{ include "paddock.modelFile" $model | quote }}
    - {{ default "" $model.sha256 | quote }}
  {{- end }}
  env:
    - name: HOME
      value: /var/lib/paddock
    {{- if $model.hf }}
    - name: PADDOCK_STATE_DIR
      value: /var/lib/paddock
    - name: PADDOCK_MODELS_DIR
      value: /models
    - name: PADDOCK_ALIAS
      value: {{ $model.name | quote }}
    - name: PADDOCK_HF
      value: {{ $model.hf | quote }}
    {{- include "paddock.settingsEnv" (dict "settings" (pick $model "speculation" "adapters" (ternary "projector" "" (eq (default "" $model.projector) "none")))) | nindent 4 }}
    {{- if include "paddock.hasSecret" (dict "root" .root "key" "hf-token" "value" .root.Values.secrets.hfToken) }}
    - name: HF_TOKEN
      valueFrom: {secretKeyRef: {name: {{ include "paddock.secret" .root }}, key: hf-token}}
    {{- end }}
    {{- end }}
    {{- with $model.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  resources:
    requests: {cpu: 100m, memory: 256Mi}
    limits: {memory: 2Gi}
  securityContext: {{ include "paddock.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - {name: models, mountPath: /models}
    - {name: state, mountPath: /var/lib/paddock}
    - {name: tmp, mountPath: /tmp}
    {{- with $model.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "paddock.workerImage" -}}
{{- $images := .root.Values.image -}}
{{- default (include "paddock.image" (dict "root" .root "image" (ternary $images.workerCuda $images.worker (gt (int .model.gpus) 0)))) .model.image -}}
{{- end -}}

{{/* What the container asks for, its GPUs included. */}}
{{- define "paddock.workerResources" -}}
{{- $resources := deepCopy .resources -}}
{{- if gt (int .gpus) 0 -}}
{{- $limits := default dict $resources.limits -}}
{{- $_ := set $limits .gpuResource .gpus -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "paddock.workerPod" -}}
{{- $model := .model -}}
{{- $root := .root -}}
{{- $selector := include "paddock.selector" (dict "root" $root "component" "worker" "model" $model) -}}
{{- $drain := include "paddock.workerDrain" . | int -}}
{{- $own := eq $model.kind "StatefulSet" -}}
{{- $models := include "paddock.modelCache" . | fromJson -}}
{{- $isShared := not $model.modelCache -}}
{{- $name := include "paddock.workerName" . -}}
metadata:
  labels:
    {{- include "paddock.podLabels" (dict "root" $root "component" "worker" "model" $model) | nindent 4 }}
    {{- with $model.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    paddock/model: {{ $model.name | quote }}
    {{- with $model.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "paddock.podStart" (dict "root" $root "pod" $model) | nindent 2 }}
  {{- include "paddock.spread" (dict "pod" $model "selector" $selector) | nindent 2 }}
  {{- with $model.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  terminationGracePeriodSeconds: {{ add $drain (include "paddock.endS" . | int) }}
  securityContext: {{ include "paddock.podSecurity" . | nindent 4 }}
  {{- if or (not $model.path) $model.extraInitContainers }}
  initContainers:
    {{- if not $model.path }}
    {{- include "paddock.fetchContainer" . | nindent 4 }}
    {{- end }}
    {{- with $model.extraInitContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    - name: worker
      image: {{ include "paddock.workerImage" . }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command: [paddock, worker]
      env: {{ include "paddock.workerEnv" . | nindent 8 }}
      ports:
        - name: http
          containerPort: 8081
      startupProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: {{ ceil (divf $model.startupS 2) | int }}
      livenessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe:
        httpGet: {path: /ready, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 3
      lifecycle: {{ include "paddock.preStop" (dict "part" "worker" "flags" (list "--timeout-s" $drain)) | nindent 8 }}
      resources: {{ include "paddock.workerResources" $model | nindent 8 }}
      securityContext: {{ include "paddock.containerSecurity" . | nindent 8 }}
      volumeMounts:
        - {name: models, mountPath: /models, readOnly: true}
        - {name: state, mountPath: /var/lib/paddock}
        - {name: tmp, mountPath: /tmp}
        {{- if ne $model.promptCache.type "none" }}
        - {name: prompts, mountPath: /cache}
        {{- end }}
        {{- with $model.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with $model.extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- if not (and $own (not $isShared) (eq $models.type "claim")) }}
    - name: models
      {{- include "paddock.cacheVolume" (dict "cache" $models "claim" (ternary (printf "%s-models" (include "paddock.fullname" $root)) (printf "%s-models" $name) $isShared)) | nindent 6 }}
    {{- end }}
    {{- if not (or (eq $model.promptCache.type "none") (and $own (eq $model.promptCache.type "claim"))) }}
    - name: prompts
      {{- include "paddock.cacheVolume" (dict "cache" $model.promptCache "claim" (printf "%s-prompts" $name)) | nindent 6 }}
    {{- end }}
    - name: state
      emptyDir: {sizeLimit: {{ $model.scratch.size }}}
    - name: tmp
      emptyDir: {sizeLimit: {{ $model.scratch.size }}}
    {{- with $model.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
