{{/* What no schema can say: values that do not fit one another. Each message names the value, what it
is, and what is allowed. */}}

{{- define "paceline.refuse" -}}
{{- fail (printf "%s: got %s, expected %s" (index . 0) (index . 1 | toJson) (index . 2)) -}}
{{- end -}}

{{- define "paceline.validate" -}}
{{- $values := .Values -}}
{{- $args := include "paceline.args" . | fromYaml -}}
{{- $models := include "paceline.models" . | fromYaml -}}
{{- include "paceline.validate.methods" (dict "args" $args "models" $models) -}}
{{- include "paceline.validate.devices" (dict "values" $values "args" $args) -}}
{{- include "paceline.validate.resources" (dict "values" $values) -}}
{{- include "paceline.validate.clients" (dict "root" . "args" $args) -}}
{{- range $role := list "target" "drafter" "gateway" -}}
  {{- $scaling := get (index $args $role) "autoscaling" -}}
  {{- if $scaling -}}
    {{- $min := int (get $scaling "min_replicas" | default 1) -}}
    {{- $max := int (get $scaling "max_replicas" | default 4) -}}
    {{- if lt $max $min -}}
      {{- include "paceline.refuse" (list (printf "%s.autoscaling.max_replicas" $role) $max (printf "at least min_replicas, %d" $min)) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- if and $values.ray.faultTolerance.passwordSecret (not $values.ray.faultTolerance.redisAddress) -}}
  {{- include "paceline.refuse" (list "ray.faultTolerance.redisAddress" "" "HOST:PORT of the Redis of passwordSecret") -}}
{{- end -}}
{{- if eq (toString $args.tracing.exporter) "file" -}}
  {{- include "paceline.refuse" (list "tracing.exporter" "file" "otlp, console or none: nobody reads files of a pod") -}}
{{- end -}}
{{- end -}}

{{- define "paceline.validate.methods" -}}
{{- $args := .args -}}
{{- $models := .models -}}
{{- $method := default (ternary "draft_model" "auto" (gt (len $args.speculation) 0)) $args.speculation.method -}}
{{- $actors := eq $args.topology "actors" -}}
{{- $schedules := list "static" "confidence" "freedave" "prophet" "sched" "dparallel" "set_block" "learn2pd" "apd" "remask" -}}
{{- $lacks := and (hasKey $models "target") (not (hasKey $models "drafter")) -}}
{{- if and $args.model.adapter_drafters (or $actors $lacks) -}}
  {{- include "paceline.refuse" (list "model.adapter_drafters" (keys $args.model.adapter_drafters | sortAlpha) "none, or topology: colocated and a models.drafter") -}}
{{- end -}}
{{- range $adapter, $name := $args.model.adapter_drafters -}}
  {{- if not (hasKey $args.model.adapters $adapter) -}}
    {{- include "paceline.refuse" (list (printf "model.adapter_drafters.%s" $adapter) $name "the name of one of model.adapters") -}}
  {{- end -}}
{{- end -}}
{{- if and $args.model.corpus (ne $args.engine "paceline") -}}
  {{- include "paceline.refuse" (list "model.corpus" $args.model.corpus (printf "none with engine: %s" $args.engine)) -}}
{{- end -}}
{{- if eq $args.engine "diffusion" -}}
  {{- if $actors -}}
    {{- include "paceline.refuse" (list "topology" $args.topology "colocated with engine: diffusion: nothing drafts there") -}}
  {{- end -}}
  {{- if and $args.speculation.method (not (has $method $schedules)) -}}
    {{- include "paceline.refuse" (list "speculation.method" $method (printf "a schedule with engine: diffusion (%s)" (join ", " $schedules))) -}}
  {{- end -}}
  {{- range $role := list "drafter" "heads" -}}
    {{- if hasKey $models $role -}}
      {{- include "paceline.refuse" (list (printf "models.%s" $role) (get $models $role).name "none with engine: diffusion") -}}
    {{- end -}}
  {{- end -}}
  {{- if $args.drafter.method -}}
    {{- include "paceline.refuse" (list "drafter.method" $args.drafter.method "null with engine: diffusion") -}}
  {{- end -}}
  {{- if $args.model.adapters -}}
    {{- include "paceline.refuse" (list "model.adapters" (keys $args.model.adapters) "none with engine: diffusion") -}}
  {{- end -}}
  {{- if ne $args.model.dtype "float32" -}}
    {{- include "paceline.refuse" (list "model.dtype" $args.model.dtype "float32 with engine: diffusion") -}}
  {{- end -}}
  {{- range $key := list "kv_tokens" "drafter_device" -}}
    {{- if get $args.model $key -}}
      {{- include "paceline.refuse" (list (printf "model.%s" $key) (get $args.model $key) "null with engine: diffusion") -}}
    {{- end -}}
  {{- end -}}
  {{- if not (has $args.model.device (list "auto" "cpu")) -}}
    {{- include "paceline.refuse" (list "model.device" $args.model.device "auto or cpu with engine: diffusion") -}}
  {{- end -}}
  {{- if ne $args.target.numerics "fastest" -}}
    {{- include "paceline.refuse" (list "target.numerics" $args.target.numerics "fastest with engine: diffusion, which adds in an order of its own") -}}
  {{- end -}}
  {{- if $args.direct.enabled -}}
    {{- include "paceline.refuse" (list "direct.enabled" true "false with engine: diffusion, which takes no drafts of devices") -}}
  {{- end -}}
  {{- if $args.online.enabled -}}
    {{- include "paceline.refuse" (list "online.enabled" true "false with engine: diffusion") -}}
  {{- end -}}
{{- else if has $method $schedules -}}
  {{- include "paceline.refuse" (list "speculation.method" $method "a method that writes in order, or engine: diffusion") -}}
{{- end -}}
{{- if eq $args.engine "vllm" -}}
  {{- if has $args.model.dtype (list "q8_0" "q4_0" "int8") -}}
    {{- include "paceline.refuse" (list "model.dtype" $args.model.dtype "float32, bfloat16, float16 or auto with engine: vllm") -}}
  {{- end -}}
  {{- if ne $args.target.numerics "fastest" -}}
    {{- include "paceline.refuse" (list "target.numerics" $args.target.numerics "fastest with engine: vllm, which adds in an order of its own") -}}
  {{- end -}}
  {{- if $args.drafter.method -}}
    {{- include "paceline.refuse" (list "drafter.method" $args.drafter.method "null with engine: vllm") -}}
  {{- end -}}
  {{- if $args.direct.enabled -}}
    {{- include "paceline.refuse" (list "direct.enabled" true "false with engine: vllm, which takes no drafts of devices") -}}
  {{- end -}}
  {{- if and $actors (hasPrefix "vllm_" $method) -}}
    {{- include "paceline.refuse" (list "speculation.method" $method "one of Paceline's with topology: actors, or topology: colocated") -}}
  {{- end -}}
{{- else if hasPrefix "vllm_" $method -}}
  {{- include "paceline.refuse" (list "speculation.method" $method "a method of Paceline, or engine: vllm") -}}
{{- end -}}
{{- if and $args.drafter.method $models.drafter -}}
  {{- include "paceline.refuse" (list "drafter.method" $args.drafter.method "null where there is a models.drafter") -}}
{{- end -}}
{{- if and $models (not $models.drafter) (ne $args.engine "diffusion") (eq $method "draft_model") (or (not $actors) $args.drafter.method) -}}
  {{- include "paceline.refuse" (list "speculation.method" $method "a method that needs no draft model (prompt_lookup, ar), or a models.drafter") -}}
{{- end -}}
{{- end -}}

{{/* Devices and GPUs of the pods that compute. */}}
{{- define "paceline.validate.devices" -}}
{{- $args := .args -}}
{{- $gpus := include "paceline.gpus" .values.pods.target.resources | int -}}
{{- $devices := dict "model.device" (list $args.model.device "target" $gpus) -}}
{{- if and (eq $args.topology "actors") (not $args.drafter.method) -}}
  {{- $name := ternary "model.drafter_device" "model.device" (not (empty $args.model.drafter_device)) -}}
  {{- $drafting := include "paceline.gpus" .values.pods.drafter.resources | int -}}
  {{- $_ := set $devices (printf "%s " $name) (list (default $args.model.device $args.model.drafter_device) "drafter" $drafting) -}}
{{- else if $args.model.drafter_device -}}
  {{- $_ := set $devices "model.drafter_device" (list $args.model.drafter_device "target" $gpus) -}}
{{- end -}}
{{- range $name, $device := $devices -}}
  {{- $number := regexFind "[0-9]+$" (index $device 0) | default "0" | int -}}
  {{- if and (hasPrefix "cuda" (index $device 0)) (ge $number (index $device 2)) -}}
    {{- include "paceline.refuse" (list (trim $name) (index $device 0) (printf "a device of pods.%s.resources.limits, which has %d GPUs (nvidia.com/gpu)" (index $device 1) (index $device 2))) -}}
  {{- end -}}
{{- end -}}
{{- $parallel := int $args.vllm.tensor_parallel_size -}}
{{- if and (eq $args.engine "vllm") (gt $parallel (max 1 $gpus | int)) -}}
  {{- include "paceline.refuse" (list "vllm.tensor_parallel_size" $parallel (printf "at most the GPUs of pods.target.resources.limits, %d" $gpus)) -}}
{{- end -}}
{{- end -}}

{{/* Requests and limits of all pods. */}}
{{- define "paceline.validate.resources" -}}
{{- $all := dict "sweep" .values.sweep -}}
{{- range $role := list "head" "target" "drafter" "gateway" -}}
  {{- $_ := set $all (printf "pods.%s" $role) (index $.values.pods $role) -}}
{{- end -}}
{{- range $where, $pod := $all -}}
  {{- $limits := default dict $pod.resources.limits -}}
  {{- $requests := default dict $pod.resources.requests -}}
  {{- if not (gt (include "paceline.cpus" $pod.resources | float64) 0.0) -}}
    {{- include "paceline.refuse" (list (printf "%s.resources.limits.cpu" $where) 0 "more than 0") -}}
  {{- end -}}
  {{- range $name, $amount := $limits -}}
    {{- if contains "/" $name -}}
      {{- if not (regexMatch "^[0-9]+$" (toString $amount)) -}}
        {{- include "paceline.refuse" (list (printf "%s.resources.limits.%s" $where $name) $amount "a whole number of devices") -}}
      {{- end -}}
    {{- end -}}
  {{- end -}}
  {{- range $name, $amount := $requests -}}
    {{- $limit := get $limits $name -}}
    {{- if hasKey $limits $name -}}
      {{- if gt (include "paceline.quantity" $amount | float64) (include "paceline.quantity" $limit | float64) -}}
        {{- include "paceline.refuse" (list (printf "%s.resources.requests.%s" $where $name) $amount (printf "at most its limit, %v" $limit)) -}}
      {{- end -}}
    {{- else if contains "/" $name -}}
      {{- include "paceline.refuse" (list (printf "%s.resources.requests.%s" $where $name) $amount "the same among the limits, as for all devices") -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{/* Ports, certificates, and who is let in. */}}
{{- define "paceline.validate.clients" -}}
{{- $root := .root -}}
{{- $values := $root.Values -}}
{{- $gateway := .args.gateway -}}
{{- if eq (toString $gateway.grpc_port) (toString $gateway.http_port) -}}
  {{- include "paceline.refuse" (list "gateway.http_port" $gateway.http_port "another port than gateway.grpc_port's") -}}
{{- end -}}
{{- range $name, $port := dict "gateway.grpc_port" $gateway.grpc_port "gateway.http_port" $gateway.http_port "direct.port" .args.direct.port -}}
  {{- if has (int $port) (list 8080 52365) -}}
    {{- include "paceline.refuse" (list $name $port "a port that Ray does not take: it has 8080 and 52365") -}}
  {{- end -}}
{{- end -}}
{{- if and .args.direct.enabled (not (include "paceline.gatewayTls" $root)) -}}
  {{- include "paceline.refuse" (list "direct.enabled" true "false without TLS at the gateway (tls.mode, tls.gateway): clients send no ticket in plain text") -}}
{{- end -}}
{{- $tls := $values.tls -}}
{{- if and $tls.requireClientCert (or (ne $tls.mode "secret") (not $tls.gateway)) -}}
  {{- include "paceline.refuse" (list "tls.requireClientCert" true "tls.mode: secret and tls.gateway: true, with client-ca.crt in tls.secret.gateway") -}}
{{- end -}}
{{- range $name := list "gateway" "replicas" -}}
  {{- with index $tls.secret $name -}}
    {{- if ne $tls.mode "secret" -}}
      {{- include "paceline.refuse" (list "tls.mode" $tls.mode (printf "secret, as tls.secret.%s is %s" $name .)) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- with $tls.certManager.issuerRef -}}
  {{- if ne $tls.mode "certManager" -}}
    {{- include "paceline.refuse" (list "tls.mode" $tls.mode "certManager, as tls.certManager.issuerRef is set") -}}
  {{- end -}}
  {{- if not .name -}}
    {{- include "paceline.refuse" (list "tls.certManager.issuerRef.name" "" "the name of an issuer") -}}
  {{- end -}}
{{- end -}}
{{- $service := $values.service -}}
{{- if ne $service.type "LoadBalancer" -}}
  {{- range $name := list "loadBalancerClass" "loadBalancerSourceRanges" -}}
    {{- with get $service $name -}}
      {{- include "paceline.refuse" (list "service.type" $service.type (printf "LoadBalancer, as service.%s is set" $name)) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- if eq $service.type "ClusterIP" -}}
  {{- range $name, $port := $service.nodePorts -}}
    {{- if $port -}}
      {{- include "paceline.refuse" (list "service.type" $service.type (printf "NodePort or LoadBalancer, as service.nodePorts.%s is %v" $name $port)) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- $ingress := $values.ingress -}}
{{- if and $ingress.enabled (not $ingress.grpc.host) (not $ingress.http.host) -}}
  {{- include "paceline.refuse" (list "ingress.grpc.host" "" "a host name for gRPC, or one in ingress.http.host") -}}
{{- end -}}
{{- if and $ingress.enabled $ingress.grpc.host (eq $ingress.grpc.host $ingress.http.host) -}}
  {{- include "paceline.refuse" (list "ingress.http.host" $ingress.http.host "another host than ingress.grpc.host: both serve every path") -}}
{{- end -}}
{{- if and $values.tenants.testTokenSecret (not (include "paceline.tenantsSecret" $root)) -}}
  {{- include "paceline.refuse" (list "tenants.testTokenSecret" $values.tenants.testTokenSecret "nothing without tenants: they know the token") -}}
{{- end -}}
{{- /* Whoever opens the gateway to other networks says who may come in, and encrypts. */ -}}
{{- $public := "" -}}
{{- if ne $service.type "ClusterIP" -}}
  {{- $public = printf "service.type: %s" $service.type -}}
  {{- if and (not (include "paceline.gatewayTls" $root)) (not $service.allowPlainText) -}}
    {{- include "paceline.refuse" (list (ternary "tls.mode" "tls.gateway" (eq $tls.mode "disabled")) (ternary $tls.mode "false" (eq $tls.mode "disabled")) (printf "TLS at the gateway with %s, or service.allowPlainText: true" $public)) -}}
  {{- end -}}
{{- else if $ingress.enabled -}}
  {{- $public = "ingress.enabled" -}}
{{- else if $values.gatewayApi.enabled -}}
  {{- $public = "gatewayApi.enabled" -}}
{{- end -}}
{{- if $ingress.enabled -}}
  {{- range $protocol := list "grpc" "http" -}}
    {{- $host := index $ingress $protocol -}}
    {{- if and $host.host (not $host.tlsSecret) (not $service.allowPlainText) -}}
      {{- include "paceline.refuse" (list (printf "ingress.%s.tlsSecret" $protocol) "" (printf "a Secret with a certificate of %s, or service.allowPlainText: true" $host.host)) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- if and $public (not (include "paceline.tenantsSecret" $root)) (not $tls.requireClientCert) (not $service.allowAnonymous) -}}
  {{- include "paceline.refuse" (list "tenants.secretName" "" (printf "a Secret with tenants, as %s lets clients in from other networks, or service.allowAnonymous: true" $public)) -}}
{{- end -}}
{{- end -}}
