//! Configuration files: diagnostics, precedence and the resulting values.

use std::path::Path;

use quintlet_config::diagnostics::{Diagnostic, render};
use quintlet_config::node::{Data, LocatedValue, Origin};
use quintlet_config::print::print;
use quintlet_config::table::{Document, Service};
use quintlet_config::{Config, Sources};

const HEAD: &str = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";
const OWN: &str = "apiVersion: quintlet.dev/v1alpha1\nkind: QuintletConfiguration\n";

fn read(text: &str) -> Result<Config, Vec<Diagnostic>> {
    Config::from_bytes(text.as_bytes(), Path::new("/etc/quintlet/config.yaml"), false)
}

fn rendered(text: &str) -> String {
    match read(text) {
        Ok(config) => render(&config.warnings),
        Err(diagnostics) => render(&diagnostics),
    }
}

fn text(config: &Config, field: &str) -> String {
    let node = config.value(Document::Kubelet, field);
    node.map(|n| n.text().map_or_else(|| n.data.to_string(), str::to_owned)).unwrap_or_default()
}

#[test]
fn all_errors_are_reported_together_with_their_lines_and_fields() {
    let file = format!(
        "{HEAD}\
syncFrequency: \"5\"
maxPods: many
imageGCHighThresholdPercent: 40
imageGCLowThresholdPercent: 80
evictionHard:
  memory.available: 10%x
  memory.avail: 5%
evictionHardd: {{}}
authentication:
  webhok:
    enabled: true
  webhook: yes
clusterDNS: 10.96.0.10
registerWithTaints:
- value: x
  effect: NoRun
---
{OWN}\
runDirr: /run/x
relistPeriod: -1s
"
    );
    assert_eq!(
        rendered(&file),
        "\
quintlet: 10 problems in /etc/quintlet/config.yaml
  line 3  syncFrequency: \"5\": a duration needs a unit, e.g. 5s
  line 4  maxPods: \"many\": must be a whole number
  line 8  evictionHard.memory.available: \"10%x\" is neither a quantity nor a percentage
  line 9  evictionHard.memory.avail: unsupported eviction signal (did you mean memory.available?)
  line 14  authentication.webhook: \"yes\": must be a map
  line 15  clusterDNS: \"10.96.0.10\": must be a list, e.g. [\"10.96.0.10\"]
  line 17  registerWithTaints[0].key: required
  line 18  registerWithTaints[0].effect: \"NoRun\": must be NoSchedule, PreferNoSchedule or NoExecute
  line 22  runDirr: unknown field (did you mean runDir?)
  line 23  relistPeriod: -1s is below 1ms
  warning: line 10  evictionHardd: unknown field, ignored (did you mean evictionHard?)
  warning: line 12  authentication.webhok: unknown field, ignored (did you mean webhook?)
"
    );
}

#[test]
fn unsupported_suites_and_groups_are_skipped_and_unknown_ones_refused() {
    // Values from hardening guides.
    let hardened = "tlsCipherSuites: [TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305, \
                    TLS_RSA_WITH_AES_128_GCM_SHA256]\ntlsCurvePreferences: [4588, 29]\n";
    assert_eq!(
        rendered(&format!("{HEAD}{hardened}")),
        "\
quintlet: 2 warnings in /etc/quintlet/config.yaml
  warning: line 3  tlsCipherSuites[2]: \"TLS_RSA_WITH_AES_128_GCM_SHA256\": not supported, it is insecure
  warning: line 4  tlsCurvePreferences[0]: 4588: X25519MLKEM768 is not supported
"
    );
    for (fields, want) in [
        ("tlsCipherSuites: [TLS_AES_128_GCM_SHA256]", ""),
        (
            "tlsCipherSuites: [TLS_ECDHE]",
            "line 3  tlsCipherSuites[0]: \"TLS_ECDHE\": unknown; supported: TLS_ECDHE_ECDSA",
        ),
        ("tlsCipherSuites: [TLS_RSA_WITH_RC4_128_SHA]", "line 3  tlsCipherSuites: no element is supported"),
        ("tlsCurvePreferences: [29, 1]", "line 3  tlsCurvePreferences[1]: 1: unknown; supported: 29"),
        ("tlsCurvePreferences: [25]", "line 3  tlsCurvePreferences: no element is supported"),
    ] {
        let rendered = rendered(&format!("{HEAD}{fields}\n"));
        assert!(rendered.contains(want) && rendered.is_empty() == want.is_empty(), "{fields}: {rendered}");
    }
}

#[test]
fn rules_between_fields_are_those_of_the_kubelet() {
    for (fields, want) in [
        (
            "imageGCHighThresholdPercent: 40",
            "line 3  imageGCHighThresholdPercent: 40 is below imageGCLowThresholdPercent 80",
        ),
        (
            "imageGCHighThresholdPercent: 80",
            "line 3  imageGCHighThresholdPercent: 80 is not above imageGCLowThresholdPercent 80",
        ),
        (
            "imageGCLowThresholdPercent: 90",
            "line 3  imageGCLowThresholdPercent: 90 is not below imageGCHighThresholdPercent 85",
        ),
        ("imageMaximumGCAge: 1m", "line 3  imageMaximumGCAge: a maximum of 1m is below the minimum of 2m"),
        (
            "enforceNodeAllocatable: [none, pods]",
            "line 3  enforceNodeAllocatable: none must be the only element",
        ),
        (
            "enforceNodeAllocatable: [system-reserved]",
            "line 3  enforceNodeAllocatable: system-reserved needs systemReservedCgroup",
        ),
        (
            "kubeReservedCgroup: /k\nenforceNodeAllocatable: [kube-reserved, kube-reserved-compressible]",
            "line 4  enforceNodeAllocatable: kube-reserved and kube-reserved-compressible exclude each other",
        ),
        (
            "cgroupsPerQOS: false",
            "line 3  cgroupsPerQOS: false: enforceNodeAllocatable must be [] or [none] then, but is [pods]",
        ),
        (
            "enforceNodeAllocatable: [pods, system-reserved, pods]\nsystemReservedCgroup: /s",
            "line 3  enforceNodeAllocatable: duplicate element pods",
        ),
        (
            "evictionHard: {memory.available: 1Gi}\nevictionSoft: {memory.available: 1Gi}\n\
             evictionSoftGracePeriod: {memory.available: 1m}",
            "line 4  evictionSoft.memory.available: 1Gi is not above evictionHard.memory.available 1Gi, and has no effect",
        ),
        (
            "evictionSoft: {nodefs.available: 9.5%}\nevictionSoftGracePeriod: {nodefs.available: 1m}",
            "line 3  evictionSoft.nodefs.available: 9.5% is not above evictionHard.nodefs.available 10%, and has no effect",
        ),
        (
            "mergeDefaultEvictionSettings: true\nevictionHard: {nodefs.available: 1Gi}\n\
             evictionSoft: {memory.available: 64Mi}\nevictionSoftGracePeriod: {memory.available: 1m}",
            "line 5  evictionSoft.memory.available: 64Mi is not above evictionHard.memory.available 100Mi, and has no effect",
        ),
        (
            "evictionMinimumReclaim: {nodefs.available: 0%}",
            "line 3  evictionMinimumReclaim.nodefs.available: \"0%\" must be positive",
        ),
        (
            "reservedMemory:\n- numaNode: 0\n  limits: {cpu: \"1\"}",
            "line 5  reservedMemory[0].limits.cpu: only memory and hugepages-SIZE can be reserved per NUMA node",
        ),
        (
            "reservedMemory:\n- numaNode: 0\n  limits: {memory: 0Mi}",
            "line 5  reservedMemory[0].limits.memory: must not be zero",
        ),
        (
            "reservedMemory:\n- numaNode: 1\n  limits: {hugepages-2Mi: 4Mi, memory: 1Gi}\n\
             - numaNode: 1\n  limits: {memory: 1Gi}",
            "line 7  reservedMemory[1].limits.memory: is already reserved for NUMA node 1 by [0]",
        ),
        ("systemCgroups: /s", "line 3  systemCgroups: needs cgroupRoot"),
        (
            "reservedSystemCPUs: 0-1\nkubeReservedCgroup: /k",
            "line 4  kubeReservedCgroup: excludes reservedSystemCPUs",
        ),
        (
            "evictionSoft: {memory.available: 1Gi}",
            "line 3  evictionSoft.memory.available: needs a grace period, evictionSoftGracePeriod.memory.available",
        ),
        (
            "shutdownGracePeriod: 10s\nshutdownGracePeriodCriticalPods: 20s",
            "line 4  shutdownGracePeriodCriticalPods: 20s is above shutdownGracePeriod 10s",
        ),
        ("shutdownGracePeriod: 10ms", "line 3  shutdownGracePeriod: 10ms is below 1s"),
        (
            "serializeImagePulls: true\nmaxParallelImagePulls: 2",
            "line 4  maxParallelImagePulls: 2 pulls at once, but serializeImagePulls is true",
        ),
        (
            "enableSystemLogHandler: false\nenableSystemLogQuery: true",
            "line 4  enableSystemLogQuery: true: needs enableSystemLogHandler",
        ),
        ("tlsCertFile: /c", "line 3  tlsCertFile: needs tlsPrivateKeyFile"),
        (
            "---\napiVersion: quintlet.dev/v1alpha1\nkind: QuintletConfiguration\nsubscribers: {tls: {listen: '[::]:10270', \
             certFile: /c, keyFile: /k, clientCAFile: /a}}",
            "line 6  subscribers.tls.listen: needs subscribers.tls.names",
        ),
        (
            "---\napiVersion: quintlet.dev/v1alpha1\nkind: QuintletConfiguration\nsubscribers: {tls: {names: [watcher]}}",
            "line 6  subscribers.tls.names: needs subscribers.tls.listen",
        ),
        (
            "---\napiVersion: quintlet.dev/v1alpha1\nkind: QuintletConfiguration\nsubscribers: {tls: {listen: '[::]:10250', \
             certFile: /c, keyFile: /k, clientCAFile: /a, names: [x]}}",
            "line 6  subscribers.tls.listen: has the port of port",
        ),
        ("readOnlyPort: 10250", "line 3  readOnlyPort: is the same as port"),
        (
            "userNamespaces: {idsPerPod: 70000}",
            "line 3  userNamespaces.idsPerPod: 70000 is no multiple of 65536",
        ),
        ("cpuCFSQuotaPeriod: 2s", "line 3  cpuCFSQuotaPeriod: 2s is above 1s"),
        (
            "crashLoopBackOff: {maxContainerRestartPeriod: 301s}",
            "line 3  crashLoopBackOff.maxContainerRestartPeriod: 301s is above 5m",
        ),
        ("containerLogMaxFiles: 1", "line 3  containerLogMaxFiles: 1 is below 2"),
        ("containerLogMonitorInterval: 1s", "line 3  containerLogMonitorInterval: 1s is below 3s"),
        (
            "cgroupRoot: /q\nsystemCgroups: /",
            "line 4  systemCgroups: system container cannot be root (\"/\")",
        ),
        (
            "memoryReservationPolicy: TieredReservation\nfeatureGates: {MemoryQoS: false}",
            "line 3  memoryReservationPolicy: TieredReservation: needs featureGates.MemoryQoS: true",
        ),
        (
            "memoryThrottlingFactor: 0.8\nfeatureGates: {MemoryQoS: false}",
            "line 3  memoryThrottlingFactor: 0.8: needs featureGates.MemoryQoS: true",
        ),
        (
            "featureGates: {ClusterTrustBundle: false}",
            "line 3  featureGates: ClusterTrustBundleProjection: true: needs ClusterTrustBundle: true",
        ),
        (
            "reservedSystemCPUs: 3-1",
            "line 3  reservedSystemCPUs: \"3-1\" is not a list of CPUs, expected for example 0-3,8",
        ),
        (
            "memoryThrottlingFactor: 1.5",
            "line 3  memoryThrottlingFactor: 1.5: must be more than 0 and at most 1",
        ),
        ("podLogsDir: logs", "line 3  podLogsDir: \"logs\" is not an absolute path"),
        ("nodeLeaseDurationSeconds: -1", "line 3  nodeLeaseDurationSeconds: -1 is below 1"),
        (
            "runOnce: true",
            "line 3  runOnce: true: unsupported: the kubelet has deprecated it; `quintctl up --once` serves tests",
        ),
        (
            "registerWithTaints:\n- {key: a, effect: NoExecute}\n- {key: a, effect: NoExecute, value: x}",
            "line 5  registerWithTaints[1]: duplicate taint a with effect NoExecute",
        ),
        ("maxPods: 1\nmaxPods: 2", "line 4  maxPods: duplicate key (first in line 3)"),
    ] {
        let rendered = rendered(&format!("{HEAD}{fields}\n"));
        assert_eq!(
            rendered,
            format!("quintlet: 1 problem in /etc/quintlet/config.yaml\n  {want}\n"),
            "{fields}"
        );
    }
    let labels =
        rendered(&format!("{OWN}nodeLabels: {{kubernetes.io/x: y, node.kubernetes.io/x: y, a: b}}\n"));
    assert!(
        labels.contains("nodeLabels.kubernetes.io/x: a node may not") && labels.lines().count() == 2,
        "{labels}"
    );
}

#[test]
fn thresholds_and_reservations_that_the_kubelet_accepts_are_accepted() {
    for fields in [
        "evictionMinimumReclaim: {memory.available: \"0\", nodefs.available: 90%, imagefs.available: 2Ti}",
        "evictionHard: {memory.available: 1Gi}\nevictionSoft: {memory.available: 10%}\n\
         evictionSoftGracePeriod: {memory.available: 1m}",
        "evictionHard: {memory.available: 0%}\nevictionSoft: {memory.available: 1%}\n\
         evictionSoftGracePeriod: {memory.available: 1m}",
        "evictionSoft: {memory.available: 50Mi}\nevictionSoftGracePeriod: {memory.available: 0s}",
        "evictionHard: {nodefs.available: 1Gi}\nevictionSoft: {memory.available: 64Mi}\n\
         evictionSoftGracePeriod: {memory.available: 1m}",
        "reservedMemory:\n- numaNode: 0\n  limits: {memory: 1Gi, hugepages-1Gi: 1Gi}\n- numaNode: 1\n  limits: {memory: 1Gi}",
    ] {
        let rendered = rendered(&format!("{HEAD}{fields}\n"));
        assert_eq!(rendered, "", "{fields}");
    }
}

#[test]
fn a_minimum_reclaim_above_the_capacity_causes_a_warning() {
    for (fields, want) in [
        (
            "evictionMinimumReclaim: {nodefs.available: 90.5%, imagefs.available: 85%}",
            "warning: line 3  evictionMinimumReclaim.nodefs.available: 90.5% and evictionHard.nodefs.available 10% are more than the capacity",
        ),
        (
            "evictionHard: {memory.available: 1Gi}\nevictionSoft: {pid.available: 30%}\n\
             evictionSoftGracePeriod: {pid.available: 1m}\nevictionMinimumReclaim: {pid.available: 71%}",
            "warning: line 6  evictionMinimumReclaim.pid.available: 71% and evictionSoft.pid.available 30% are more than the capacity",
        ),
    ] {
        assert_eq!(
            rendered(&format!("{HEAD}{fields}\n")),
            format!("quintlet: 1 warning in /etc/quintlet/config.yaml\n  {want}\n")
        );
    }
}

#[test]
fn a_part_of_a_threshold_without_an_effect_causes_a_warning() {
    for (fields, want) in [
        (
            "evictionSoftGracePeriod: {pid.available: 1m}",
            "warning: line 3  evictionSoftGracePeriod.pid.available: has no evictionSoft threshold",
        ),
        (
            "evictionMinimumReclaim: {pid.available: 1%}",
            "warning: line 3  evictionMinimumReclaim.pid.available: has no threshold",
        ),
        (
            "evictionHard: {nodefs.available: 0%}\nevictionMinimumReclaim: {nodefs.available: 1Gi}",
            "warning: line 4  evictionMinimumReclaim.nodefs.available: has no threshold",
        ),
        (
            "evictionHard: {memory.available: 1Gi, containerfs.available: 15%}",
            "warning: line 3  evictionHard.containerfs.available: ignored, the threshold of nodefs or imagefs applies",
        ),
        (
            "evictionSoft: {containerfs.inodesFree: 15%}\nevictionSoftGracePeriod: {containerfs.inodesFree: 1m}",
            "warning: line 3  evictionSoft.containerfs.inodesFree: ignored, the threshold of nodefs or imagefs applies",
        ),
    ] {
        assert_eq!(
            rendered(&format!("{HEAD}{fields}\n")),
            format!("quintlet: 1 warning in /etc/quintlet/config.yaml\n  {want}\n")
        );
    }
}

#[test]
fn thresholds_that_the_kubelet_refuses_are_refused() {
    const GRACE: &str = "evictionSoftGracePeriod: {memory.available: 1m}";
    for (fields, want) in [
        ("evictionHard: {memory.free: 1Gi}", "evictionHard.memory.free: unsupported eviction signal"),
        (
            &format!("{GRACE}\nevictionSoft: {{memory.free: 1Gi}}"),
            "evictionSoft.memory.free: unsupported eviction signal",
        ),
        (
            "evictionSoftGracePeriod: {memory.free: 1m}",
            "evictionSoftGracePeriod.memory.free: unsupported eviction signal",
        ),
        (
            "evictionMinimumReclaim: {memory.free: 1Gi}",
            "evictionMinimumReclaim.memory.free: unsupported eviction signal",
        ),
        ("evictionHard: {memory.available: \"0\"}", "evictionHard.memory.available: \"0\" must be positive"),
        (
            "evictionHard: {memory.available: -1Gi}",
            "evictionHard.memory.available: \"-1Gi\" must be positive",
        ),
        (
            "evictionHard: {memory.available: 101%}",
            "evictionHard.memory.available: \"101%\" is not between 0% and 100%",
        ),
        (
            "evictionHard: {memory.available: -5%}",
            "evictionHard.memory.available: \"-5%\" is neither a quantity nor a percentage",
        ),
        (
            "evictionHard: {memory.available: lots}",
            "evictionHard.memory.available: \"lots\" is neither a quantity nor a percentage",
        ),
        (
            &format!("{GRACE}\nevictionSoft: {{memory.available: 0Mi}}"),
            "evictionSoft.memory.available: \"0Mi\" must be positive",
        ),
        (
            "evictionSoftGracePeriod: {memory.available: -1s}",
            "evictionSoftGracePeriod.memory.available: -1s is below 0s",
        ),
        (
            "evictionSoftGracePeriod: {memory.available: \"90\"}",
            "evictionSoftGracePeriod.memory.available: \"90\": a duration needs a unit",
        ),
        (
            "evictionMinimumReclaim: {memory.available: -1Gi}",
            "evictionMinimumReclaim.memory.available: \"-1Gi\" is negative",
        ),
        (
            "evictionMinimumReclaim: {memory.available: -1%}",
            "evictionMinimumReclaim.memory.available: \"-1%\" must be positive",
        ),
        (
            "evictionMaxPodGracePeriod: 3000000000",
            "evictionMaxPodGracePeriod: 3000000000 is above 2147483647",
        ),
    ] {
        let rendered = rendered(&format!("{HEAD}{fields}\n"));
        let is_error = |line: &str| line.starts_with("  line ") && line.contains(&format!("  {want}"));
        assert!(rendered.lines().any(is_error), "{fields}: {rendered}");
    }
}

#[test]
fn each_document_has_a_known_kind_that_occurs_once() {
    for (file, want) in [
        ("", "line 1  is empty"),
        ("- a\n", "line 1  a list: must be a map of fields"),
        ("maxPods: 1\n", "line 1  kind: required: KubeletConfiguration or QuintletConfiguration"),
        (
            "kind: ClusterConfiguration\n",
            "line 1  kind: \"ClusterConfiguration\": must be KubeletConfiguration or QuintletConfiguration",
        ),
        ("kind: KubeletConfiguration\n", "line 1  apiVersion: required: kubelet.config.k8s.io/v1beta1"),
        (
            "kind: KubeletConfiguration\napiVersion: v1\n",
            "line 2  apiVersion: \"v1\": must be kubelet.config.k8s.io/v1beta1",
        ),
        (&format!("{HEAD}---\n{HEAD}"), "line 4  duplicate KubeletConfiguration"),
        (&format!("{HEAD}a: [\n"), "line "),
    ] {
        let rendered = rendered(file);
        assert!(
            rendered.contains(want) && rendered.starts_with("quintlet: 1 problem in"),
            "{file}: {rendered}"
        );
    }
    let binary = Config::from_bytes(b"a: 1\nb: \xff\n", Path::new("f"), false).unwrap_err();
    assert_eq!(render(&binary), "quintlet: 1 problem in f\n  line 2  is not UTF-8\n");
}

#[test]
fn a_kubeadm_file_is_accepted_and_lacks_no_feature() {
    let config = read(include_str!("../fixtures/kubeadm.yaml")).expect("a good file");
    assert_eq!(config.warnings, []);
    assert_eq!(text(&config, "staticPodPath"), "/etc/kubernetes/manifests");
    // Zero and null mean the default.
    assert_eq!(text(&config, "syncFrequency"), "1m");
    assert_eq!(text(&config, "nodeStatusReportFrequency"), "5m");
    assert_eq!(text(&config, "containerRuntimeEndpoint"), "unix:///run/containerd/containerd.sock");
    assert_eq!(config.fixed_gates(), None);
    assert_eq!(config.ignored(Service::PodSync), []);
}

#[test]
fn a_field_without_an_effect_is_reported_once_with_its_value() {
    let config = read(&format!(
        "{HEAD}evictionHard: {{memory.available: 5%}}\nfailSwapOn: true\nfeatureGates: {{MemoryQoS: true, KubeletSeparateDiskGC: true, CSIVolumeHealth: true, PodCertificateRequest: true, EventedPLEG: true, KubletPSI: true}}\n\
         kubeReservedCgroup: /k\nenforceNodeAllocatable: [pods, kube-reserved]\nhairpinMode: none\ncpuManagerPolicy: none\n"
    ))
    .expect("a good file");
    assert_eq!(config.fixed_gates().as_deref(), Some("featureGates.KubeletSeparateDiskGC: true"));
    assert_eq!(config.ignored(Service::PodSync)[0].0, "hairpinMode: none");
    assert!(
        render(&config.warnings)
            .contains("featureGates.KubletPSI: unknown feature gate, ignored (did you mean KubeletPSI?)")
    );
}

#[test]
fn with_strict_a_warning_is_an_error() {
    let file = format!("{HEAD}maxPod: 1\n");
    assert!(Config::from_bytes(file.as_bytes(), Path::new("f"), false).is_ok());
    let diagnostics = Config::from_bytes(file.as_bytes(), Path::new("f"), true).unwrap_err();
    assert_eq!(
        render(&diagnostics),
        "quintlet: 1 problem in f\n  line 3  maxPod: unknown field, ignored (did you mean maxPods?)\n"
    );
}

#[test]
fn drop_ins_merge_in_lexical_order_and_every_value_has_its_origin() {
    let dir = tempfile::tempdir().expect("a directory");
    let put = |name: &str, text: String| {
        let path = dir.path().join(name);
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("made");
        std::fs::write(&path, text).expect("written");
        path
    };
    let file = put(
        "config.yaml",
        format!(
            "{HEAD}maxPods: 1\nclusterDNS: [10.0.0.1]\nsyncFrequency: 5s\nsystemReserved: {{cpu: 100m, memory: 1Gi}}\ntracing: {{endpoint: \"c:1\"}}\n"
        ),
    );
    put("drop/20.conf", format!("{HEAD}maxPods: 3\nclusterDNS: [10.0.0.2]\n"));
    put("drop/10.conf", format!("{HEAD}maxPods: 2\nsystemReserved: {{cpu: 200m}}\n"));
    put("drop/30/a.conf", format!("{HEAD}syncFrequency: null\nstaticPodPath: pods\n"));
    put("drop/ignored.yaml", "not: read".to_owned());
    let sources =
        Sources { file: Some(file.clone()), drop_ins: Some(dir.path().join("drop")), ..Sources::default() };
    let config = Config::load(&sources).expect("good files");
    assert_eq!(text(&config, "maxPods"), "3");
    assert_eq!(config.value(Document::Kubelet, "clusterDNS").map(|n| n.elements().len()), Some(1));
    assert_eq!(text(&config, "syncFrequency"), "1m", "null in a drop-in takes a value back");
    assert_eq!(text(&config, "systemReserved.cpu"), "200m");
    assert_eq!(text(&config, "systemReserved.memory"), "1Gi");
    assert_eq!(text(&config, "staticPodPath"), dir.path().join("drop/30/pods").display().to_string());
    let origin = |field: &str| {
        config.value(Document::Kubelet, field).map(|n| n.origin.to_string()).unwrap_or_default()
    };
    let at = |name: &str, line: usize| format!("{}:{line}", dir.path().join(name).display());
    assert_eq!(origin("maxPods"), at("drop/20.conf", 3));
    assert_eq!(origin("systemReserved.cpu"), at("drop/10.conf", 4));
    assert_eq!(origin("systemReserved.memory"), at("config.yaml", 6));
    assert_eq!(origin("syncFrequency"), "default");

    put("drop/15.conf", "apiVersion: v1\nkind: KubeletConfiguration\nmaxPods: x\n".to_owned());
    let diagnostics = render(&Config::load(&sources).unwrap_err());
    assert!(
        diagnostics.starts_with("quintlet: 2 problems in") && diagnostics.contains("15.conf"),
        "{diagnostics}"
    );
}

#[test]
fn a_missing_file_is_an_error() {
    let sources = Sources {
        file: Some("/nowhere/config.yaml".into()),
        drop_ins: Some("/nowhere/drop".into()),
        ..Sources::default()
    };
    let diagnostics = render(&Config::load(&sources).unwrap_err());
    assert_eq!(diagnostics.matches("cannot be read: No such file or directory").count(), 2, "{diagnostics}");
}

#[test]
fn flags_override_files_and_feature_gates_of_flags_are_merged() {
    let row = |field: &str| Document::Kubelet.row(field).expect("a field");
    let flag = |field: &str, text: &str| {
        let row = row(field);
        let name = format!("--{}", row.flag().expect("a flag"));
        (Document::Kubelet, row, row.kind.from_flag(&[text.to_owned()], &name))
    };
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("c.yaml");
    std::fs::write(
        &file,
        format!(
            "{HEAD}maxPods: 1\nsystemReserved: {{cpu: 1, memory: 1Gi}}\nfeatureGates: {{MemoryQoS: true}}\n"
        )
        .replace("cpu: 1", "cpu: \"1\""),
    )
    .expect("written");
    let mut sources = Sources {
        file: Some(file),
        flags: vec![
            flag("maxPods", "7"),
            flag("systemReserved", "cpu=2"),
            flag("featureGates", "EventedPLEG=false"),
        ],
        ..Sources::default()
    };
    let config = Config::load(&sources).expect("good");
    assert_eq!(text(&config, "maxPods"), "7");
    assert_eq!(text(&config, "systemReserved.cpu"), "2");
    assert_eq!(text(&config, "systemReserved.memory"), "", "a flag replaces a map");
    assert_eq!(text(&config, "featureGates.MemoryQoS"), "true");
    assert_eq!(text(&config, "featureGates.EventedPLEG"), "false");
    assert_eq!(
        config.value(Document::Kubelet, "maxPods").map(|n| n.origin.clone()),
        Some(Origin::Flag("--max-pods".into()))
    );

    sources.flags.push(flag("podsPerCore", "x"));
    sources.flags.push(flag("syncFrequency", "5"));
    let diagnostics = render(&Config::load(&sources).unwrap_err());
    assert_eq!(
        diagnostics,
        "quintlet: 2 problems in flags\n  --pods-per-core  podsPerCore: \"x\": must be a whole number\n  \
         --sync-frequency  syncFrequency: \"5\": a duration needs a unit, e.g. 5s\n"
    );
}

#[test]
fn the_report_frequency_follows_the_update_frequency_if_only_that_is_set() {
    let config = read(&format!("{HEAD}nodeStatusUpdateFrequency: 7s\n")).expect("good");
    assert_eq!(text(&config, "nodeStatusReportFrequency"), "7s");
    let both =
        read(&format!("{HEAD}nodeStatusUpdateFrequency: 7s\nnodeStatusReportFrequency: 9s\n")).expect("good");
    assert_eq!(text(&both, "nodeStatusReportFrequency"), "9s");
    assert_eq!(text(&read(HEAD).expect("good"), "nodeStatusReportFrequency"), "5m");
}

#[test]
fn verbosity_sets_the_log_filter_unless_that_is_set() {
    let filter = |file: String| {
        let config = read(&file).expect("good");
        config.value(Document::Quintlet, "logFilter").and_then(LocatedValue::text).map(str::to_owned)
    };
    for (verbosity, want) in [(1, "info"), (4, "debug"), (6, "trace")] {
        assert_eq!(filter(format!("{HEAD}logging: {{verbosity: {verbosity}}}\n")).as_deref(), Some(want));
    }
    assert_eq!(
        filter(format!("{HEAD}logging: {{verbosity: 9}}\n---\n{OWN}logFilter: warn\n")).as_deref(),
        Some("warn")
    );
}

#[test]
fn a_disabled_feature_gate_resets_the_maximum_of_the_back_off() {
    let field = "crashLoopBackOff.maxContainerRestartPeriod";
    let set = format!("{HEAD}crashLoopBackOff: {{maxContainerRestartPeriod: 20s}}\n");
    assert_eq!(text(&read(&set).expect("good"), field), "20s");
    let off = format!("{set}featureGates: {{KubeletCrashLoopBackOffMax: false}}\n");
    assert_eq!(text(&read(&off).expect("good"), field), "5m");
}

#[test]
fn the_printed_configuration_shows_origins_hides_secrets_and_parses_to_the_same_values() {
    let file = format!(
        "{HEAD}staticPodURLHeader: {{Authorization: [Bearer s3cret]}}\nclusterDNS:\n- 10.96.0.10\n\
         evictionHard: {{memory.available: 5%}}\nregisterWithTaints: [{{key: a/b, effect: NoExecute, value: \"1\"}}]\n\
         maxPods: 20\nclusterDomain: \"a: b # c\\n\"\nallowedUnsafeSysctls: [\"net.*\", \"true\"]\n---\n{OWN}nodeLabels: {{a: \"yes\", b: \"\"}}\n"
    );
    let config = read(&file).expect("good");
    let printed = print(&config);
    assert!(!printed.contains("s3cret"), "{printed}");
    for line in [
        "maxPods: 20   # /etc/quintlet/config.yaml:8",
        "fileCheckFrequency: 20s   # default",
        "  memory.available: 5%   # /etc/quintlet/config.yaml:6",
        "- 10.96.0.10   # /etc/quintlet/config.yaml:5",
        "- key: a/b   # /etc/quintlet/config.yaml:7",
        "  webhook:",
        "    enabled: true   # default",
        "kind: QuintletConfiguration",
        "runDir: /run/quintlet   # default",
    ] {
        assert!(printed.lines().any(|l| l == line), "{line}\n{printed}");
    }
    let again = read(&printed).unwrap_or_else(|m| panic!("{}\n{printed}", render(&m)));
    for document in Document::ALL {
        for row in document.rows().iter().filter(|r| !r.secret) {
            let (one, two) = (config.value(document, row.field), again.value(document, row.field));
            let same = match (one, two) {
                (Some(one), Some(two)) => one.equals(two),
                (one, two) => one.is_none() && two.is_none(),
            };
            assert!(same, "{}: {one:?} {two:?}", row.field);
        }
    }
    assert!(matches!(
        again.value(Document::Kubelet, "staticPodURLHeader").map(|n| &n.data),
        Some(Data::Map(_))
    ));
}

#[test]
fn sysctls_of_all_pods_are_valid_and_namespaced_and_occur_once() {
    let gate = "featureGates: {DefaultPodSysctls: true}\n";
    let good = "{net/ipv4/tcp_rmem: 4096 87380 6291456, kernel.sem: 1 2 3 4, kernel.domainname: d, user.max_user_namespaces: '4'}";
    assert_eq!(read(&format!("{HEAD}{gate}defaultPodSysctls: {good}\n")).expect("good sysctls").warnings, []);
    for (sysctls, want) in [
        ("{vm.swappiness: '1'}", "defaultPodSysctls.vm.swappiness: is not namespaced"),
        ("{kernel/hostname: h}", "defaultPodSysctls.kernel/hostname: is not namespaced"),
        ("{net.Core: '1'}", "defaultPodSysctls.net.Core: must have at most 253 characters"),
        (
            "{net.core.somaxconn: '1', net/core/somaxconn: '2'}",
            "defaultPodSysctls.net/core/somaxconn: is the same sysctl as net.core.somaxconn",
        ),
    ] {
        let refused = read(&format!("{HEAD}{gate}defaultPodSysctls: {sysctls}\n"));
        let text = render(&refused.expect_err(sysctls));
        assert!(text.contains(want), "{want}\n{text}");
    }
}

#[test]
fn the_rules_for_the_machine_apply_with_a_file() {
    let config =
        read(&format!("{HEAD}failSwapOn: false\nqosReserved: {{memory: 50%}}\n")).expect("a good file");
    assert_eq!(text(&config, "failSwapOn"), "false");
    assert_eq!(text(&config, "failCgroupV1"), "true");
    assert!(
        render(&config.warnings)
            .ends_with("line 4  qosReserved: has no effect without featureGates.QOSReserved: true\n"),
        "{:?}",
        config.warnings
    );
    assert_eq!(text(&config, "makeIPTablesUtilChains"), "true");
    let sysctls = "defaultPodSysctls: {net.core.somaxconn: \"7\"}\n";
    let without_gate = read(&format!("{HEAD}{sysctls}")).expect("a good file");
    assert!(
        render(&without_gate.warnings).ends_with(
            "line 3  defaultPodSysctls: has no effect without featureGates.DefaultPodSysctls: true\n"
        ),
        "{:?}",
        without_gate.warnings
    );
    let with_gate = read(&format!("{HEAD}featureGates: {{DefaultPodSysctls: true}}\n{sysctls}"));
    assert_eq!(with_gate.expect("a good file").warnings, []);
    let without = Config::load(&Sources::default()).expect("no file");
    assert!(without.value(Document::Kubelet, "failCgroupV1").is_none());
    assert!(without.value(Document::Kubelet, "makeIPTablesUtilChains").is_none());
    assert!(without.value(Document::Quintlet, "setKernelTunables").is_none());
    let gate = read(&format!("{HEAD}featureGates: {{QOSReserved: true}}\nqosReserved: {{memory: 50%}}\n"));
    assert_eq!(gate.expect("a good file").warnings, []);
}
