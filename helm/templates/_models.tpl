{{/* What is worked out of a model's entry. */}}

{{/* A model as JSON: its entry over what `workers` says for all. Takes root and entry. */}}
{{- define "paddock.model" -}}
{{- mergeOverwrite (deepCopy .root.Values.workers) (deepCopy .entry) | mustToRawJson -}}
{{- end -}}

{{/* The first model's name. `models: null` takes the chart's own entry away, which no schema sees. */}}
{{- define "paddock.firstModel" -}}
{{- if not .Values.models -}}
{{- fail "\n\nmodels: null leaves nothing to serve; name at least one model, such as `{name: gemma-3-1b, hf: ggml-org/gemma-3-1b-it-GGUF:Q4_K_M}`, or leave models out for that one\n" -}}
{{- end -}}
{{- (first .Values.models).name -}}
{{- end -}}

{{/* Where the model's file lies in a worker. `paddock models pull` names it by the model's name. */}}
{{- define "paddock.modelFile" -}}
{{- if .path -}}
{{- ternary .path (printf "/models/%s" .path) (hasPrefix "/" .path) -}}
{{- else -}}
{{- printf "/models/%s.gguf" (regexReplaceAll "[/:]" .name "--") -}}
{{- end -}}
{{- end -}}

{{/* Fields of a catalog, as workers get them; `gpus` is at least 1 there. */}}
{{- define "paddock.catalogModel" -}}
{{- $entry := pick . "name" "hf" "slots" "ctx" "kv_tokens" "llama" "sampling" "adapters" "speculation" "price" "projector" "projector_on_gpu" "image_min_tokens" "image_max_tokens" "tool_family" "open_objects" "chat_template" "thinking" "thinking_budget" "thinking_budget_message" "chat_template_kwargs" "shared_prompts" -}}
{{- if gt (int .gpus) 1 -}}{{- $_ := set $entry "gpus" .gpus -}}{{- end -}}
{{- if not .hf -}}{{- $_ := set $entry "path" (include "paddock.modelFile" .) -}}{{- end -}}
{{- mustToRawJson $entry -}}
{{- end -}}

{{/* Not empty for a model that may go to zero workers, or has none. */}}
{{- define "paddock.mayBeAbsent" -}}
{{- $least := ternary .replicas .autoscaling.min (eq .autoscaling.type "none") -}}
{{- if eq (int $least) 0 -}}true{{- end -}}
{{- end -}}

{{- define "paddock.catalog" -}}
{{- $root := . -}}
{{- $models := list -}}
{{- range .Values.models -}}
{{- $model := include "paddock.model" (dict "root" $root "entry" .) | fromJson -}}
{{- $entry := include "paddock.catalogModel" $model | fromJson -}}
{{- /* Gateways are ready before a worker of these was seen. */}}
{{- if include "paddock.mayBeAbsent" $model -}}{{- $_ := set $entry "workers" 0 -}}{{- end -}}
{{- $models = append $models $entry -}}
{{- end -}}
{{- $catalog := dict "models" $models "aliases" .Values.aliases -}}
{{- with .Values.default -}}{{- $_ := set $catalog "default" . -}}{{- end -}}
{{- with .Values.unknownModel -}}{{- $_ := set $catalog "unknown_model" . -}}{{- end -}}
{{- mustToPrettyJson $catalog -}}
{{- end -}}

{{/* llama.cpp's settings. Threads are those that the container may use: a worker would count the node's. */}}
{{- define "paddock.llama" -}}
{{- $llama := deepCopy (default dict .llama) -}}
{{- if not $llama.n_threads -}}
{{- $cpu := dig "limits" "cpu" (dig "requests" "cpu" "" .resources) .resources | toString -}}
{{- $cores := ternary (div (trimSuffix "m" $cpu | int) 1000 | int) (int (float64 $cpu)) (hasSuffix "m" $cpu) -}}
{{- if $cpu -}}{{- $_ := set $llama "n_threads" (max 1 $cores) -}}{{- end -}}
{{- end -}}
{{- mustToRawJson $llama -}}
{{- end -}}

{{/* Takes root and model: the volume's definition of the model's files, or of the cached prompts. */}}
{{- define "paddock.modelCache" -}}
{{- mergeOverwrite (deepCopy .root.Values.modelCache) (deepCopy (default dict .model.modelCache)) | mustToRawJson -}}
{{- end -}}

{{- define "paddock.cacheVolume" -}}
{{- if eq .cache.type "emptyDir" -}}
emptyDir: {sizeLimit: {{ .cache.size }}}
{{- else if eq .cache.type "existing" -}}
persistentVolumeClaim: {claimName: {{ .cache.existingClaim }}}
{{- else -}}
persistentVolumeClaim: {claimName: {{ .claim }}}
{{- end -}}
{{- end -}}

{{- define "paddock.claimSpec" -}}
accessModes: {{ .accessModes | default (list "ReadWriteOnce") | toJson }}
resources:
  requests:
    storage: {{ .size }}
{{- with .storageClass }}
storageClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* MiB that cached prompts may take: nine tenths of their volume, where its size is in Mi, Gi or Ti; empty: not known. */}}
{{- define "paddock.promptMib" -}}
{{- $mib := dict "Mi" 1.0 "Gi" 1024.0 "Ti" 1048576.0 -}}
{{- $unit := regexFind "[MGT]i$" .size -}}
{{- if and $unit (has .type (list "emptyDir" "claim")) -}}
{{- mulf (trimSuffix $unit .size | float64) (get $mib $unit) 0.9 | floor | max 1 | int -}}
{{- end -}}
{{- end -}}

{{/* Seconds. Nobody waits for a pod to end for longer than a day, which `paddock drain` would refuse. */}}
{{- define "paddock.requestTimeout" -}}
{{- ceil (default 3600 .Values.gateway.settings.request_timeout_s) | int | min 86000 -}}
{{- end -}}
{{- define "paddock.gatewayDrain" -}}
{{- $own := .Values.gateway.settings.drain_s -}}
{{- ternary (include "paddock.requestTimeout" .) (ceil (default 0 $own) | int | toString) (kindIs "invalid" $own) -}}
{{- end -}}
{{- define "paddock.workerDrain" -}}
{{- $own := .model.settings.worker_drain_s -}}
{{- ternary (include "paddock.requestTimeout" .root) (ceil (default 0 $own) | int | toString) (kindIs "invalid" $own) -}}
{{- end -}}
{{- define "paddock.endS" -}}30{{- end -}}
