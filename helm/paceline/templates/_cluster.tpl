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
