{{/* Fails if values contradict each other, with the names of both. */}}
{{- define "quintlet.validate" -}}
{{- $values := .Values -}}
{{- $bootstrap := $values.bootstrap -}}
{{- if $bootstrap.enabled -}}
{{- if $values.kubeconfig.secretName }}{{ fail "bootstrap.enabled and kubeconfig.secretName exclude each other: with a bootstrap each node gets a kubeconfig of its own" }}{{ end -}}
{{- if not $values.kubeconfig.hostPath }}{{ fail "bootstrap.enabled needs kubeconfig.hostPath: the file that pod-sync writes on each host" }}{{ end -}}
{{- if and $bootstrap.secretName $bootstrap.hostPath }}{{ fail "bootstrap.secretName and bootstrap.hostPath exclude each other" }}{{ end -}}
{{- if include "quintlet.bootstrapsByAccount" . -}}
{{- if not $bootstrap.server }}{{ fail "bootstrap.enabled needs bootstrap.server, the URL of the API server, unless bootstrap.secretName or bootstrap.hostPath names a kubeconfig" }}{{ end -}}
{{- else -}}
{{- $other := ternary "bootstrap.secretName" "bootstrap.hostPath" (ne $bootstrap.secretName "") -}}
{{- if $bootstrap.server }}{{ fail (printf "bootstrap.server has no effect with %s: that kubeconfig names its server" $other) }}{{ end -}}
{{- if $bootstrap.approve }}{{ fail (printf "bootstrap.approve has no effect with %s: it approves requests of the service account only" $other) }}{{ end -}}
{{- if and $bootstrap.hostPath (eq $bootstrap.hostPath $values.kubeconfig.hostPath) }}{{ fail "bootstrap.hostPath and kubeconfig.hostPath are the same file: one is read, the other is written" }}{{ end -}}
{{- end -}}
{{- if and $bootstrap.servingCertificate (not $values.nodeApi.enabled) }}{{ fail "bootstrap.servingCertificate needs nodeApi.enabled" }}{{ end -}}
{{- else -}}
{{- range $name := list "server" "secretName" "hostPath" "approve" "servingCertificate" -}}
{{- if get $bootstrap $name }}{{ fail (printf "bootstrap.%s has no effect without bootstrap.enabled" $name) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- $runtime := $values.containerd -}}
{{- if and $runtime.enabled $runtime.socket }}{{ fail "containerd.socket has no effect with containerd.enabled" }}{{ end -}}
{{- if not (or $runtime.enabled $runtime.socket) }}{{ fail "containerd.enabled=false needs containerd.socket: a runtime of the host that no kubelet uses" }}{{ end -}}
{{- if not (or $runtime.enabled $runtime.rootDir) }}{{ fail "containerd.enabled=false needs containerd.rootDir: where that runtime has its images, for eviction and garbage collection" }}{{ end -}}
{{- if gt (int $values.probeService.instances) 1 -}}
{{- range (index $values.services "probe-service").extraArgs -}}
{{- if hasPrefix "--id" . }}{{ fail "--id in services.probe-service.extraArgs contradicts probeService.instances: each instance has an ID of its own" }}{{ end -}}
{{- end -}}
{{- end -}}
{{- /* A service that finds subscribers there has no directory for its socket. */ -}}
{{- range regexSplit "(?m)^---" $values.config -1 -}}
{{- if hasKey (fromYaml .) "subscribers" }}{{ fail "subscribers in config has no effect in the chart: use the value subscribers" }}{{ end -}}
{{- end -}}
{{- $tls := $values.subscribers.tls -}}
{{- if $tls.listen -}}
{{- if not $tls.secretName }}{{ fail "subscribers.tls.listen needs subscribers.tls.secretName: there is no such port without TLS" }}{{ end -}}
{{- if not $tls.names }}{{ fail "subscribers.tls.listen needs subscribers.tls.names: the clients that may subscribe" }}{{ end -}}
{{- if not (include "quintlet.hasNodeApi" .) }}{{ fail "subscribers.tls.listen needs node-api, which serves them: nodeApi.enabled and a kubeconfig" }}{{ end -}}
{{- else if or $tls.secretName $tls.names }}{{ fail "subscribers.tls.secretName and subscribers.tls.names have no effect without subscribers.tls.listen" }}{{ end -}}
{{- if and $values.plegService.followerArgs (eq (int $values.plegService.followers) 0) }}{{ fail "plegService.followerArgs has no effect without plegService.followers" }}{{ end -}}
{{- $ids := dict -}}
{{- range $name, $id := $values.users -}}
{{- $key := toString (int $id) -}}
{{- if hasKey $ids $key }}{{ fail (printf "users.%s and users.%s are both %s: each service needs a user of its own" (get $ids $key) $name $key) }}{{ end -}}
{{- $_ := set $ids $key $name -}}
{{- end -}}
{{- $ports := dict -}}
{{- $listen := dict -}}
{{- if include "quintlet.hasNodeApi" . -}}
{{- $_ := set $listen "nodeApi.port" $values.nodeApi.port -}}
{{- if $tls.listen }}{{ $_ := set $listen "subscribers.tls.listen" (regexFind "[0-9]+$" $tls.listen) }}{{ end -}}
{{- if $values.nodeApi.healthzPort }}{{ $_ := set $listen "nodeApi.healthzPort" $values.nodeApi.healthzPort }}{{ end -}}
{{- end -}}
{{- if $values.metrics.enabled }}{{ range $name, $port := $values.metrics.ports }}{{ $_ := set $listen (printf "metrics.ports.%s" $name) $port }}{{ end }}{{ end -}}
{{- range $name, $port := $listen -}}
{{- $key := toString (int $port) -}}
{{- if hasKey $ports $key }}{{ fail (printf "%s and %s are both %s" (get $ports $key) $name $key) }}{{ end -}}
{{- $_ := set $ports $key $name -}}
{{- end -}}
{{- $dirs := dict -}}
{{- range $name, $dir := dict "host.runDir" $values.host.runDir "host.rootDir" $values.host.rootDir "host.podLogsDir" $values.host.podLogsDir "host.containerLogsDir" $values.host.containerLogsDir "containerd.rootDir" (include "quintlet.runtimeRoot" .) "nodeApi.certDir" $values.nodeApi.certDir -}}
{{- if $dir -}}
{{- $clean := clean $dir -}}
{{- if hasKey $dirs $clean }}{{ fail (printf "%s and %s are both %s" (get $dirs $clean) $name $clean) }}{{ end -}}
{{- $_ := set $dirs $clean $name -}}
{{- end -}}
{{- end -}}
{{- end }}
