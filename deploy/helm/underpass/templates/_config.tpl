{{/* The text of the configuration file. */}}
{{- define "underpass.config" -}}
{{- if .Values.nodes.enabled }}
{{- range list "[[peer]]" "[tls]" "[kubernetes]" }}
{{- if contains . $.Values.extraConfig }}
{{- fail (printf "extraConfig has %s, and the nodes find each other by the API: set nodes.enabled=false, or take it out" .) }}
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.extraConfig }}
{{ . }}
{{- end }}
[pods]
nri = {{ ternary (printf "%s/nri.sock" .Values.paths.nri) "" (ne .Values.paths.nri "") | toJson }}
dir = {{ printf "%s/pods" .Values.paths.state | toJson }}
plugins = {{ ternary .Values.paths.plugins "" (ne .Values.paths.nri "") | toJson }}
annotations = {{ .Values.annotations | toJson }}
handlers = {{ .Values.handlers | toJson }}
include = {{ .Values.namespaces.include | toJson }}
exclude = {{ .Values.namespaces.exclude | toJson }}

[metrics]
listen = "{{ ternary "0.0.0.0" "127.0.0.1" .Values.metrics.public }}:{{ .Values.metrics.port }}"
per_pod = {{ .Values.metrics.perPod | toJson }}
pods_max = {{ .Values.metrics.podsMax | int }}
reasons_max = {{ .Values.metrics.reasonsMax | int }}

[kubernetes]
api = true
{{- if .Values.nodes.enabled }}
nodes = true
ca = {{ printf "%s-ca" .Release.Name | toJson }}

[tls]
ca = {{ printf "%s/tls/ca.crt" .Values.paths.state | toJson }}
cert = {{ printf "%s/tls/node.crt" .Values.paths.state | toJson }}
key = {{ printf "%s/tls/node.key" .Values.paths.state | toJson }}
{{- end }}
{{- if .Values.csi.enabled }}

[csi]
kubelet = {{ .Values.csi.kubelet | toJson }}
namespace = {{ .Values.csi.namespace | toJson }}
{{- end }}
{{- if .Values.webhook.enabled }}

[webhook]
listen = "[::]:8443"
namespace = {{ .Release.Namespace | toJson }}
service = "{{ .Release.Name }}-webhook"
secret = "{{ .Release.Name }}-webhook"
configuration = "{{ include "underpass.cluster" . }}-webhook"
{{- end }}
{{- end }}
