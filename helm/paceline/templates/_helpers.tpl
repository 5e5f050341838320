{{/* Names and labels. */}}

{{- define "paceline.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* The labels that select the pods of this release. They are the same in every version of the
chart, because KubeRay replaces the whole cluster when a pod template changes. */}}
{{- define "paceline.selectorLabels" -}}
app.kubernetes.io/name: paceline
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "paceline.labels" -}}
{{ include "paceline.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "paceline.image" -}}
{{- $suffix := ternary "-cuda" "" (gt (int (include "paceline.gpus" .Values.pods.target.resources)) 0) -}}
{{- printf "%s:%s" .Values.image.repository (default (printf "%s%s" .Chart.AppVersion $suffix) .Values.image.tag) -}}
{{- end -}}

{{- define "paceline.serviceAccountName" -}}
{{- if .Values.serviceAccount.name -}}{{ .Values.serviceAccount.name }}
{{- else if .Values.serviceAccount.create -}}{{ include "paceline.fullname" . }}
{{- else -}}default{{- end -}}
{{- end -}}

{{/* CPUs of a pod as a number: "500m" is 0.5. Ray rounds the CPUs of a node up. */}}
{{- define "paceline.cpus" -}}
{{- $cpu := toString (default (dig "requests" "cpu" "1" .) (dig "limits" "cpu" "" .)) -}}
{{- if hasSuffix "m" $cpu -}}
{{- divf (trimSuffix "m" $cpu | float64) 1000 -}}
{{- else -}}{{ $cpu }}{{- end -}}
{{- end -}}

{{- define "paceline.gpus" -}}
{{- dig "limits" "nvidia.com/gpu" 0 . -}}
{{- end -}}

{{/* "true" if Ray's autoscaler runs. */}}
{{- define "paceline.rayAutoscaling" -}}
{{- $incremental := eq .Values.upgrade.strategy "NewClusterWithIncrementalUpgrade" -}}
{{- $wanted := or .Values.target.autoscaling .Values.drafter.autoscaling $incremental -}}
{{- if and $incremental (eq (toString .Values.ray.autoscaling.enabled) "false") -}}
{{- fail "upgrade.strategy NewClusterWithIncrementalUpgrade needs Ray's autoscaler: leave ray.autoscaling.enabled null or true" -}}
{{- end -}}
{{- if kindIs "bool" .Values.ray.autoscaling.enabled -}}
{{- if .Values.ray.autoscaling.enabled }}true{{ end -}}
{{- else if $wanted }}true{{ end -}}
{{- end -}}

{{/* Names of Secrets with certificates. */}}
{{- define "paceline.tlsSecret.gateway" -}}
{{- if eq .Values.tls.mode "secret" -}}
{{- required "tls.secret.gateway: name the Secret of the gateway (tls.mode: secret, tls.gateway: true)" .Values.tls.secret.gateway -}}
{{- else -}}{{ include "paceline.fullname" . }}-gateway-tls{{- end -}}
{{- end -}}

{{- define "paceline.tlsSecret.replicas" -}}
{{- if eq .Values.tls.mode "secret" -}}
{{- required "tls.secret.replicas: name the Secret of the replicas (tls.mode: secret)" .Values.tls.secret.replicas -}}
{{- else -}}{{ include "paceline.fullname" . }}-replica-tls{{- end -}}
{{- end -}}

{{/* "true" if the gateway ends TLS. */}}
{{- define "paceline.gatewayTls" -}}
{{- if and .Values.tls.gateway (ne .Values.tls.mode "disabled") }}true{{ end -}}
{{- end -}}

{{- define "paceline.tenantsSecret" -}}
{{- if .Values.tenants.inline -}}{{ include "paceline.fullname" . }}-tenants
{{- else -}}{{ .Values.tenants.secretName }}{{- end -}}
{{- end -}}

{{/* Names and addresses in the gateway's certificate. */}}
{{- define "paceline.gatewayHosts" -}}
{{- $name := include "paceline.fullname" . -}}
{{- $hosts := list $name (printf "%s.%s" $name .Release.Namespace) (printf "%s.%s.svc" $name .Release.Namespace) (printf "%s.%s.svc.cluster.local" $name .Release.Namespace) "localhost" -}}
{{- concat $hosts .Values.tls.hosts | uniq | toJson -}}
{{- end -}}

{{/* The addresses, and the names, of a list of hosts. */}}
{{- define "paceline.onlyAddresses" -}}
{{- $found := list -}}
{{- range . -}}{{- if regexMatch "^[0-9.]+$|:" . -}}{{- $found = append $found . -}}{{- end -}}{{- end -}}
{{- $found | toJson -}}
{{- end -}}

{{- define "paceline.onlyNames" -}}
{{- $found := list -}}
{{- range . -}}{{- if not (regexMatch "^[0-9.]+$|:" .) -}}{{- $found = append $found . -}}{{- end -}}{{- end -}}
{{- $found | toJson -}}
{{- end -}}
