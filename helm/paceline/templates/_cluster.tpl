{{/* The fields that the clusters of the RayService and the RayJob share. */}}
{{- define "paceline.clusterOptions" -}}
authOptions:
  {{- if .Values.ray.auth.enabled }}
  mode: token
  {{- with .Values.ray.auth.secretName }}
  secretName: {{ . }}
  {{- end }}
  {{- else }}
  mode: disabled
  {{- end }}
{{- if .Values.ray.tls.enabled }}
tlsOptions:
  enabled: true
{{- end }}
{{- end -}}

{{- define "paceline.sweepSpace" -}}
{{- if kindIs "map" .Values.sweep.space -}}/etc/paceline/sweep/space.yaml
{{- else -}}tuning/spaces/{{ .Values.sweep.space }}.yaml{{- end -}}
{{- end -}}

{{/* Pods of a role as YAML: `min`, `first`, `max`, and `steady`, which run at least once the service is
up. `include "paceline.groupSize" (dict "root" $ "role" "target" "args" $args)`. */}}
{{- define "paceline.groupSize" -}}
{{- $block := index .args .role -}}
{{- $scaling := get $block "autoscaling" -}}
{{- $autoscaling := include "paceline.rayAutoscaling" .root -}}
{{- $first := int $block.num_replicas -}}
{{- $min := $first -}}
{{- $max := $first -}}
{{- if $scaling -}}
  {{- $min = int (get $scaling "min_replicas" | default 1) -}}
  {{- $max = int (get $scaling "max_replicas" | default 4) -}}
  {{- $first = ternary (max $min (min $max $first)) $max (not (empty $autoscaling)) -}}
{{- end -}}
{{- if not $autoscaling -}}
  {{- $min = $first -}}
{{- end -}}
{{- $steady := $min -}}
{{- if and $autoscaling (eq .root.Values.upgrade.strategy "NewClusterWithIncrementalUpgrade") -}}
  {{- $min = 0 -}}
{{- end -}}
{{- toYaml (dict "min" $min "first" $first "max" $max "steady" $steady) -}}
{{- end -}}

{{/* Pods of a role that evictions leave; 0: they may take all, and there is no budget. */}}
{{- define "paceline.minAvailable" -}}
{{- $steady := (include "paceline.groupSize" . | fromYaml).steady | int -}}
{{- $budget := (index .root.Values.pods .role).podDisruptionBudget -}}
{{- if not $budget.enabled -}}0
{{- else if kindIs "invalid" $budget.minAvailable -}}{{ sub $steady 1 }}
{{- else -}}
  {{- if ge (int $budget.minAvailable) $steady -}}
    {{- fail (printf "pods.%s.podDisruptionBudget.minAvailable: %d of %d pods would keep every node from being drained; allowed are 0 to %d" .role (int $budget.minAvailable) $steady (sub $steady 1)) -}}
  {{- end -}}
  {{- int $budget.minAvailable -}}
{{- end -}}
{{- end -}}
