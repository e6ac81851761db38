{{/* Labels that never change (no upgrade can change what a DaemonSet or a Deployment selects), and all labels. */}}
{{- define "underpass.selector" -}}
app.kubernetes.io/name: underpass
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "underpass.labels" -}}
{{ include "underpass.selector" . }}
{{ include "underpass.common" . }}
{{- end }}
{{- define "underpass.common" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}
{{/* The same of the nodes' daemons. */}}
{{- define "underpass.node" -}}
{{ include "underpass.selector" . }}
app.kubernetes.io/component: node
{{- end }}
{{- define "underpass.image" -}}
{{ printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) | quote }}
{{- end }}
{{/* The same of the webhook, whose pods are none of the daemons'. */}}
{{- define "underpass.webhook.selector" -}}
app.kubernetes.io/name: underpass-webhook
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "underpass.webhook.labels" -}}
{{ include "underpass.webhook.selector" . }}
{{ include "underpass.common" . }}
{{- end }}
{{/* Names of what has no namespace are the release's. */}}
{{- define "underpass.cluster" -}}
underpass-{{ .Release.Namespace }}-{{ .Release.Name }}
{{- end }}
{{/* The resource that gives the daemon its devices: of our own plugin, of another one, or none. */}}
{{- define "underpass.devices" -}}underpass.io/devices{{- end }}
{{- define "underpass.rdma" -}}
{{- if .Values.devicePlugin.enabled -}}
{{- if .Values.rdmaResource }}{{ fail "devicePlugin.enabled or rdmaResource, not both" }}{{ end -}}
{{ include "underpass.devices" . }}
{{- else -}}
{{ .Values.rdmaResource }}
{{- end -}}
{{- end }}
{{/* The file of a pod's configuration. It is a part of the pod (its annotation), so that a daemon of an earlier version never
reads what a later chart writes. */}}
{{- define "underpass.config.volume" -}}
downwardAPI:
  items: [{path: underpassd.toml, fieldRef: {fieldPath: "metadata.annotations['underpass.io/config']"}}]
{{- end }}
