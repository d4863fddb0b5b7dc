{{/* Names and labels. Those of selectors never change: a Deployment's selector can't be changed in an upgrade. */}}

{{/* A name of at most `max` characters that is valid in DNS; one that had to be changed carries a hash of what it was. */}}
{{- define "paddock.dns" -}}
{{- $plain := regexReplaceAll "[^a-z0-9]+" (lower .text) "-" | trimAll "-" -}}
{{- if and (eq $plain .text) (le (len $plain) (int .max)) -}}
{{- $plain -}}
{{- else -}}
{{- printf "%s-%s" ($plain | trunc (int (sub .max 7)) | trimSuffix "-") (sha256sum .text | trunc 6) | trimPrefix "-" -}}
{{- end -}}
{{- end -}}

{{- define "paddock.name" -}}
{{- include "paddock.dns" (dict "text" (default .Chart.Name .Values.nameOverride) "max" 24) -}}
{{- end -}}

{{/* At most 24 characters: beside a model's 20 it must fit the 52 that a StatefulSet's name may have. */}}
{{- define "paddock.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- include "paddock.dns" (dict "text" (default $full .Values.fullnameOverride) "max" 24) -}}
{{- end -}}

{{/* Of a model's objects. */}}
{{- define "paddock.slug" -}}
{{- include "paddock.dns" (dict "text" . "max" 20) -}}
{{- end -}}

{{- define "paddock.workerName" -}}
{{- printf "%s-worker-%s" (include "paddock.fullname" .root) (include "paddock.slug" .model.name) -}}
{{- end -}}

{{- define "paddock.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "paddock.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* What selectors ask for. Takes root, component and, of workers, model. */}}
{{- define "paddock.selector" -}}
app.kubernetes.io/name: {{ include "paddock.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .model }}
paddock/model: {{ include "paddock.slug" .name }}
{{- end }}
{{- end -}}

{{/* Of pods: without the version, which must not restart what is otherwise the same. */}}
{{- define "paddock.podLabels" -}}
{{ include "paddock.selector" . }}
app.kubernetes.io/part-of: paddock
{{- end -}}

{{/* Of objects. */}}
{{- define "paddock.labels" -}}
{{ include "paddock.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: paddock
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name (.root.Chart.Version | replace "+" "_") }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Takes root and image: the image's name. */}}
{{- define "paddock.image" -}}
{{- $image := .root.Values.image -}}
{{- $name := ternary .image (printf "%s/%s" $image.registry .image) (empty $image.registry) -}}
{{- printf "%s:%s" $name (default .root.Chart.AppVersion $image.tag) -}}
{{- end -}}
