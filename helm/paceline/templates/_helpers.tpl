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
chart, because KubeRay replaces the whole cluster when a pod template changes. Not among them:
`app.kubernetes.io/name` and `created-by`, by which KubeRay's own Services find the head. */}}
{{- define "paceline.selectorLabels" -}}
app.kubernetes.io/part-of: paceline
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "paceline.labels" -}}
app.kubernetes.io/name: paceline
{{ include "paceline.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The image of a pod: `include "paceline.image" (dict "root" $ "where" "pods.target" "pod"
.Values.pods.target)`. */}}
{{- define "paceline.image" -}}
{{- $all := .root.Values.image -}}
{{- $own := default dict .pod.image -}}
{{- $repository := default $all.repository $own.repository -}}
{{- $tag := default $all.tag $own.tag -}}
{{- $digest := $own.digest -}}
{{- if not (or $own.repository $own.tag $digest) -}}
  {{- $digest = $all.digest -}}
{{- end -}}
{{- $suffix := "" -}}
{{- range $name, $amount := default dict .pod.resources.limits -}}
  {{- if gt (int (include "paceline.gpus" (dict "limits" (dict $name $amount)))) 0 -}}
    {{- $suffix = ternary "-cuda" "amd" (hasPrefix "nvidia.com/" $name) -}}
  {{- end -}}
{{- end -}}
{{- if $digest -}}
  {{- printf "%s%s@%s" $repository (ternary (printf ":%s" $tag) "" (not (empty $tag))) $digest -}}
{{- else if and (eq $suffix "amd") (not $tag) -}}
  {{- fail (printf "%s.image.tag: name an image with ROCm, as the limits have amd.com/gpu: Paceline's own are for CPUs and CUDA" .where) -}}
{{- else -}}
  {{- printf "%s:%s" $repository (default (printf "%s%s" .root.Chart.AppVersion $suffix) $tag) -}}
{{- end -}}
{{- end -}}

{{- define "paceline.serviceAccountName" -}}
{{- if .Values.serviceAccount.name -}}{{ .Values.serviceAccount.name }}
{{- else if .Values.serviceAccount.create -}}{{ include "paceline.fullname" . }}
{{- else -}}default{{- end -}}
{{- end -}}

{{/* A quantity of Kubernetes as a number: "500m" is 0.5. */}}
{{- define "paceline.quantity" -}}
{{- $text := toString . -}}
{{- $number := regexFind "^([0-9]+\\.?[0-9]*|\\.[0-9]+)([eE][+-]?[0-9]+)?" $text -}}
{{- $scales := dict "" 1.0 "n" 0.000000001 "u" 0.000001 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 -}}
{{- mulf (float64 $number) (get $scales (trimPrefix $number $text)) -}}
{{- end -}}

{{/* CPUs of a pod as a number. Ray rounds the CPUs of a node up. */}}
{{- define "paceline.cpus" -}}
{{- include "paceline.quantity" (dig "limits" "cpu" (dig "requests" "cpu" "1" .) .) -}}
{{- end -}}

{{/* GPUs of a pod: whole ones, and slices of one (MIG), which are devices of their own. */}}
{{- define "paceline.gpus" -}}
{{- $gpus := 0 -}}
{{- range $name, $amount := default dict .limits -}}
  {{- if regexMatch "^(nvidia|amd)[.]com/(gpu|mig-.+|gpu[.]shared)$" $name -}}
    {{- $gpus = add $gpus (int $amount) -}}
  {{- end -}}
{{- end -}}
{{- $gpus -}}
{{- end -}}

{{/* "true" if Ray's autoscaler runs. */}}
{{- define "paceline.rayAutoscaling" -}}
{{- $incremental := eq .Values.upgrade.strategy "NewClusterWithIncrementalUpgrade" -}}
{{- $wanted := or .Values.target.autoscaling .Values.drafter.autoscaling .Values.gateway.autoscaling $incremental -}}
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

{{/* The port of targets for devices that come past the gateway; empty: there is none. */}}
{{- define "paceline.directPort" -}}
{{- $direct := (include "paceline.args" . | fromYaml).direct -}}
{{- if $direct.enabled }}{{ int $direct.port }}{{ end -}}
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
