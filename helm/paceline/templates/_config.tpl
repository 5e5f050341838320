{{/* The Serve config file of this release, for `serveConfigV2`. */}}

{{/* The blocks of the values, overridden by those of a sweep's best.yaml, as YAML. */}}
{{- define "paceline.args" -}}
{{- $names := list "model" "engine" "topology" "speculation" "target" "drafter" "gateway" "vllm" "online" "direct" "tracing" "experience" -}}
{{- $args := deepCopy (pick .Values "model" "engine" "topology" "speculation" "target" "drafter" "gateway" "vllm" "online" "direct" "tracing" "experience") -}}
{{- range .Values.applications -}}
  {{- $best := deepCopy (default dict .args) -}}
  {{- range $key := keys $best -}}
    {{- if not (has $key $names) -}}
      {{- fail (printf "applications[0].args.%s: the chart decides that; allowed are %s" $key (join ", " $names)) -}}
    {{- end -}}
  {{- end -}}
  {{- $own := dig "model" "target" "" $best -}}
  {{- if and $own (not $.Values.models.target) -}}
    {{- fail (printf "applications[0].args.model.target is %s, a model of the machine that was measured; say where the cluster gets that model: models.target" $own) -}}
  {{- end -}}
  {{- if hasKey $best "model" -}}
    {{- $_ := set $best "model" (omit $best.model "target" "drafter" "heads") -}}
  {{- end -}}
  {{- with $best.speculation -}}
    {{- $_ := set $args "speculation" . -}}
  {{- end -}}
  {{- $args = mustMergeOverwrite $args (omit $best "speculation") -}}
{{- end -}}
{{- toYaml $args -}}
{{- end -}}

{{- define "paceline.topology" -}}
{{- $args := include "paceline.args" . | fromYaml -}}
{{- $args.topology -}}
{{- end -}}

{{/* Where a model comes from: hub, s3, pvc or package. `include "paceline.modelSource" (dict "role"
"target" "name" "ORG/NAME")`. */}}
{{- define "paceline.modelSource" -}}
{{- $part := "[A-Za-z0-9_][A-Za-z0-9_.-]*" -}}
{{- if regexMatch "^s3://[^/@ ]+/[^ ]+$" .name -}}s3
{{- else if regexMatch "^pvc:[^/ ][^ ]*$" .name -}}pvc
{{- else if has .name (list "smollm2") -}}package
{{- else if regexMatch (printf "^(hf:(%s/)?|%s/)%s(@[^@ ]+)?$" $part $part $part) .name -}}hub
{{- else -}}
{{- fail (printf "models.%s: got %q, expected ORG/NAME or hf:ORG/NAME@REVISION, s3://BUCKET/PATH, pvc:PATH, or smollm2" .role .name) -}}
{{- end -}}
{{- end -}}

{{/* The models by role, each with `source`, `name`, and `folder`: where pods find the folder or GGUF
file. Empty for the demo pair. */}}
{{- define "paceline.models" -}}
{{- $models := dict -}}
{{- range $role := list "target" "drafter" "heads" -}}
  {{- with index $.Values.models $role -}}
    {{- $source := include "paceline.modelSource" (dict "role" $role "name" .) -}}
    {{- $folder := printf "/models/%s" $role -}}
    {{- if eq $source "pvc" -}}
      {{- $_ := required (printf "models.pvc.claimName: name the claim with the model (models.%s: %s)" $role .) $.Values.models.pvc.claimName -}}
      {{- $folder = printf "/volume/%s" (trimPrefix "pvc:" .) -}}
    {{- else if eq $source "package" -}}
      {{- if eq $role "heads" -}}
        {{- fail (printf "models.heads: got %q, a model; expected heads" .) -}}
      {{- end -}}
      {{- $folder = printf "%s.gguf" $folder -}}
    {{- end -}}
    {{- $_ := set $models $role (dict "source" $source "name" . "folder" $folder) -}}
  {{- end -}}
{{- end -}}
{{- if and $models (not $models.target) -}}
  {{- fail (printf "models.target: name the target of models.%s; without one the demo pair is served" (keys $models | sortAlpha | first)) -}}
{{- end -}}
{{- toYaml $models -}}
{{- end -}}

{{- define "paceline.serveConfig" -}}
{{- $args := include "paceline.args" . | fromYaml -}}
{{- $models := include "paceline.models" . | fromYaml -}}
{{- if and $models (not $models.drafter) (eq $args.topology "actors") (not $args.drafter.method) -}}
{{- fail "models.drafter: name a drafter, or a drafter.method, or set topology: colocated and a speculation.method that needs none" -}}
{{- end -}}
{{- range $role, $model := $models -}}
{{- $_ := set $args.model $role $model.folder -}}
{{- end -}}
{{- range $role := list "target" "drafter" "gateway" -}}
  {{- $block := index $args $role -}}
  {{- $pod := index $.Values.pods $role -}}
  {{- $_ := set $block "num_cpus" (include "paceline.cpus" $pod.resources | float64) -}}
  {{- if ne $role "gateway" -}}
    {{- $_ := set $block "num_gpus" (include "paceline.gpus" $pod.resources | float64) -}}
  {{- end -}}
  {{- $_ := set $block "resources" (dict (printf "paceline_%s" $role) 1) -}}
{{- end -}}
{{- if $args.online.enabled -}}
  {{- $role := ternary "drafter" "target" (eq $args.topology "actors") -}}
  {{- $block := index $args $role -}}
  {{- $left := subf $block.num_cpus $args.online.num_cpus -}}
  {{- if le $left 0.0 -}}
    {{- include "paceline.refuse" (list "online.num_cpus" $args.online.num_cpus (printf "less than the CPUs of pods.%s.resources, %v, which the learner shares" $role $block.num_cpus)) -}}
  {{- end -}}
  {{- $_ := set $block "num_cpus" $left -}}
{{- end -}}
{{- $gateway := $args.gateway -}}
{{- $_ := set $gateway "host" "0.0.0.0" -}}
{{- $_ := set $gateway "http_port" $gateway.http_port -}}
{{- if include "paceline.gatewayTls" . -}}
  {{- $tls := dict "cert" "/etc/paceline/gateway-tls/tls.crt" "key" "/etc/paceline/gateway-tls/tls.key" -}}
  {{- if .Values.tls.requireClientCert -}}
    {{- $_ := mustMerge $tls (dict "client_ca" "/etc/paceline/gateway-tls/client-ca.crt" "require_client_cert" true) -}}
  {{- end -}}
  {{- $_ := set $gateway "tls" $tls -}}
{{- else -}}
  {{- $_ := set $gateway "insecure" true -}}
{{- end -}}
{{- if include "paceline.tenantsSecret" . -}}
  {{- $_ := set $gateway "tenants" (printf "/etc/paceline/tenants/%s" (ternary "tenants.yaml" .Values.tenants.key (not (empty .Values.tenants.inline)))) -}}
{{- end -}}
{{- if .Values.sessionKeys.secretName -}}
  {{- $_ := set $gateway "session_keys" (printf "/etc/paceline/session-keys/%s" .Values.sessionKeys.key) -}}
{{- end -}}
{{- if $args.direct.enabled -}}
  {{- $_ := set $args.direct "host" "0.0.0.0" -}}
{{- end -}}
{{- $_ := set $args "data_plane" "node_ip" -}}
{{- if eq .Values.tls.mode "disabled" -}}
  {{- $_ := set $args "data_plane_insecure" true -}}
{{- else -}}
  {{- $_ := set $args "data_plane_tls" (dict "cert" "/etc/paceline/replica-tls/tls.crt" "key" "/etc/paceline/replica-tls/tls.key" "ca" "/etc/paceline/replica-tls/ca.crt" "server_name" "paceline-replica") -}}
{{- end -}}
{{- $fewest := int $args.target.num_replicas -}}
{{- $which := "num_replicas" -}}
{{- with $args.target.autoscaling -}}
  {{- $fewest = int (get . "min_replicas" | default 1) -}}
  {{- $which = "autoscaling.min_replicas" -}}
{{- end -}}
{{- $standby := int $args.target.standby -}}
{{- if and $standby (ge $standby $fewest) -}}
  {{- fail (printf "target.standby: got %d, expected fewer than target.%s, %d" $standby $which $fewest) -}}
{{- end -}}
{{- /* Serve replaces all replicas when args change, and none when only these numbers change. */ -}}
{{- $numbers := list -}}
{{- range $role := ternary (list "target" "drafter" "gateway") (list "target" "gateway") (eq $args.topology "actors") -}}
  {{- $block := index $args $role -}}
  {{- $scaled := or (get $block "autoscaling") (and (eq $role "target") $args.drafter.autoscaling) -}}
  {{- if not $scaled -}}
    {{- $numbers = append $numbers (dict "name" $role "num_replicas" (int $block.num_replicas)) -}}
    {{- $_ := unset $block "num_replicas" -}}
  {{- end -}}
{{- end -}}
{{- $application := dict "name" "paceline" "import_path" "paceline.deployments.app:build" "route_prefix" nil "args" $args "deployments" $numbers -}}
{{- if and .Values.autoscaling_policy (or $args.target.autoscaling $args.drafter.autoscaling $args.gateway.autoscaling) -}}
  {{- $_ := set $application "autoscaling_policy" (dict "policy_function" "paceline.cluster.autoscaling:Policy" "policy_kwargs" .Values.autoscaling_policy) -}}
{{- end -}}
{{- toYaml (dict "proxy_location" "Disabled" "applications" (list $application)) -}}
{{- end -}}
