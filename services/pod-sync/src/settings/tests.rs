use std::collections::BTreeSet;
use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Container;
use pod_sync_cri_config::resources::{ContainerPlacement, container_resources};
use pod_sync_eviction::thresholds::Amount;
use pod_sync_layout::RuntimeState;
use pod_sync_node_decisions::admission::AdmitResult;
use pod_sync_node_decisions::image_access::{Allowlist, VerificationPolicy};
use pod_sync_node_decisions::shutdown::{PriorityGracePeriod, ShutdownPlan};
use pod_sync_objects::ChangeDetectionStrategy;
use pod_sync_sources::api::ClusterView;
use quintlet_config::read;
use quintlet_config::table::Service;
use quintlet_model::quantity::Format;
use quintlet_testkit::pods::pod_of;
use serde_json::json;
use tokio::sync::watch;

use super::*;
use crate::admission::{NodeAdmission, NodeConditions};
use crate::pod_manager::Admission as _;

const KUBELET: &str = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";
const OWN: &str = "---\napiVersion: quintlet.dev/v1alpha1\nkind: QuintletConfiguration\n";

/// Returns the arguments of `pod-sync --config FILE FLAGS`.
fn args(file: &str, flags: &[&str]) -> Args {
    loaded(file, flags).unwrap_or_else(|problems| panic!("{problems}"))
}

fn loaded(file: &str, flags: &[&str]) -> Result<Args, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.yaml");
    std::fs::write(&path, format!("{KUBELET}{file}")).unwrap();
    let start = ["pod-sync".into(), "--config".into(), path.into_os_string()];
    let line: Vec<OsString> = start.into_iter().chain(flags.iter().map(Into::into)).collect();
    match read::<Args>(Service::PodSync, line) {
        Ok(loaded) => Ok(loaded.args),
        Err(quintlet_config::Exit::Invalid(diagnostics)) => {
            Err(quintlet_config::diagnostics::render(&diagnostics))
        }
        Err(other) => panic!("{other:?}"),
    }
}

fn of(file: &str, flags: &[&str]) -> NodeSettings {
    settings(&args(file, flags)).unwrap()
}

#[test]
fn fields_of_sources_arrive() {
    let file = "staticPodPath: pods\nstaticPodURL: http://m/\nstaticPodURLHeader: {X: [a, b]}\nsyncFrequency: 5s\n\
                fileCheckFrequency: 6s\nhttpCheckFrequency: 7s\ncrashLoopBackOff: {maxContainerRestartPeriod: 30s}\n";
    let args = args(file, &["--http-check-frequency", "8s"]);
    assert!(args.manifests.unwrap().ends_with("pods"), "relative to the file");
    assert_eq!(args.manifest_url.as_deref(), Some("http://m/"));
    let header = |value: &str| ("X".to_owned(), value.to_owned());
    assert_eq!(args.manifest_url_header, [header("a"), header("b")]);
    let seconds = [args.sync_frequency, args.file_check_frequency, args.http_check_frequency];
    assert_eq!(seconds, [5, 6, 8].map(Duration::from_secs), "a flag wins");
    assert_eq!(args.resources.max_container_restart_period, Duration::from_secs(30));
}

#[test]
fn fields_of_this_process_arrive() {
    let shown = |file: &str| {
        let args = args(file, &[]);
        let limits = args.process.limits();
        (limits.oom_score_adj, limits.open_files, args.eviction.kernel_memcg_notification)
    };
    assert_eq!(shown(""), (-999, Some(1_000_000), false));
    let file = "oomScoreAdj: 0\nmaxOpenFiles: 4096\nkernelMemcgNotification: true\n";
    assert_eq!(shown(file), (0, Some(4096), true));
}

#[test]
fn fields_of_evictions_arrive() {
    use pod_sync_eviction::{Signal, manager::EvictionSettings};
    let settings = |file: &str, flags: &[&str]| {
        let args = args(file, flags);
        args.eviction.settings(args.resources.enforces_pods())
    };
    let shown = |settings: &EvictionSettings| -> Vec<String> {
        let show = |t: &pod_sync_eviction::thresholds::Threshold| {
            format!("{} {:?} {:?}", t.signal, t.grace, t.minimum_reclaim.is_some())
        };
        settings.thresholds.iter().map(show).collect()
    };
    let file = "evictionHard: {memory.available: 1Gi, nodefs.available: 0%}\nevictionSoft: {memory.available: 2Gi}\n\
                evictionSoftGracePeriod: {memory.available: 1m30s}\nevictionMinimumReclaim: {memory.available: 10Mi}\n\
                evictionPressureTransitionPeriod: 30s\nevictionMaxPodGracePeriod: 60\nlocalStorageCapacityIsolation: false\n\
                enforceNodeAllocatable: [none]\n";
    let set = settings(file, &[]).unwrap().unwrap();
    assert_eq!(shown(&set), ["memory.available 0ns true", "memory.available 90s true"]);
    assert_eq!((set.transition, set.max_grace), (Duration::from_secs(30), 60));
    assert!(!set.enforces_limits);
    let merged = settings(&format!("{file}mergeDefaultEvictionSettings: true\n"), &[]).unwrap().unwrap();
    assert!(merged.thresholds.iter().any(|t| t.signal == Signal::ImageFsAvailable), "a default");
    assert!(merged.thresholds.iter().all(|t| t.signal != Signal::NodeFsAvailable), "switched off");
    let default = settings("", &[]).unwrap().unwrap();
    assert_eq!(default.thresholds.len(), 6, "the kubelet's five, and that of all pods together");
    assert_eq!((default.transition, default.max_grace), (Duration::from_secs(300), 0));
    assert!(default.enforces_limits);
    let off = "evictionHard: {memory.available: 0%}\nlocalStorageCapacityIsolation: false\n";
    assert!(settings(off, &[]).unwrap().is_none());
    let error = loaded(file, &["--eviction-soft=memory.available=1Gi"]).unwrap_err();
    let want = "evictionSoft.memory.available: 1Gi is not above evictionHard.memory.available 1Gi, and has no effect";
    assert!(error.contains(want), "{error}");
}

#[test]
fn the_detection_of_changed_objects_is_a_watch_unless_set() {
    let strategy =
        |file: &str, flags: &[&str]| args(file, flags).config_map_and_secret_change_detection_strategy;
    let document = |value: &str| format!("configMapAndSecretChangeDetectionStrategy: {value}\n");
    let flag = "--config-map-and-secret-change-detection-strategy=Cache";
    assert_eq!(strategy("", &[]), ChangeDetectionStrategy::Watch);
    assert_eq!(strategy(&document("\"\""), &[]), ChangeDetectionStrategy::Watch);
    assert_eq!(strategy(&document("Watch"), &[]), ChangeDetectionStrategy::Watch);
    assert_eq!(strategy(&document("Get"), &[]), ChangeDetectionStrategy::Get);
    assert_eq!(strategy(&document("Cache"), &[]), ChangeDetectionStrategy::Cache);
    assert_eq!(strategy(&document("Get"), &[flag]), ChangeDetectionStrategy::Cache, "a flag wins");
}

#[test]
fn fields_of_the_node_arrive() {
    let file = format!(
        "port: 7\npodCIDR: 10.5.0.0/24\npodLogsDir: /l\nrotateCertificates: true\nserverTLSBootstrap: true\n{OWN}rootDir: /r\nkubeconfig: /k\ncertDir: /p\nnodeName: N1\nnodeIPs: [10.0.0.1, \"fd00::1\"]\n\
         nodeLabels: {{a: b, c: \"\"}}\ncontainerLogsDir: \"\"\n"
    );
    let args = args(&file, &[]);
    assert_eq!(args.node.kubeconfig, Some("/k".into()));
    assert_eq!((args.container_logs_dir.as_str(), args.pod_cidr.as_str()), ("", "10.5.0.0/24"));
    let labels: Vec<_> = args.labels().into_iter().collect();
    assert_eq!(labels, [("a".to_owned(), "b".to_owned()), ("c".to_owned(), String::new())]);
    let settings = settings(&args).unwrap();
    assert!(super::settings(&self::args(&format!("{OWN}nodeIPs: [10.0.0.1, 10.0.0.2]\n"), &[])).is_err());
    assert_eq!((settings.root_dir, settings.pod_logs_dir), ("/r".into(), "/l".into()));
    assert_eq!((settings.node_name.as_str(), args.node_ip.len()), ("n1", 2));
    assert_eq!(settings.node_api_port, 7);
    let certificates = &args.certificates;
    assert!(certificates.rotate_certificates && certificates.rotate_server_certificates);
    assert_eq!((certificates.cert_dir.clone(), &certificates.bootstrap_kubeconfig), ("/p".into(), &None));
}

#[test]
fn fields_of_telemetry_arrive() {
    let file = format!(
        "logging: {{format: json, verbosity: 5}}\ntracing: {{endpoint: \"c:4317\"}}\n{OWN}runDir: /run/q\n\
         metricsListen: {{podSync: \"127.0.0.1:9\", plegService: \"127.0.0.1:8\"}}\n"
    );
    let common = args(&file, &[]).common;
    assert_eq!((common.log_format.as_str(), common.log_level.as_str()), ("json", "debug"));
    assert_eq!(common.otlp_endpoint.as_deref(), Some("http://c:4317"));
    assert_eq!(common.metrics_listen, Some("127.0.0.1:9".parse().unwrap()), "its own, not another's");
    assert_eq!(common.run_dir, PathBuf::from("/run/q"));
    let flag = args(&file, &["--otlp-endpoint", "http://d:1"]).common;
    assert_eq!(flag.otlp_endpoint.as_deref(), Some("http://d:1"));
    let rate = |file: &str, flags: &[&str]| args(file, flags).common.sampling_rate_per_million;
    assert_eq!(rate(&file, &[]), Some(0), "an endpoint in a file, as in the kubelet");
    assert_eq!(rate(&file, &["--sampling-rate-per-million=7"]), Some(7));
    assert_eq!(rate("tracing: {endpoint: \"c:4317\", samplingRatePerMillion: 10000}\n", &[]), Some(10_000));
    assert_eq!(rate("", &["--otlp-endpoint=http://d:1"]), None);
}

#[test]
fn rates_of_probes_arrive() {
    let rates = |file: &str, flags: &[&str]| {
        let rates = of(file, flags).probe_rates;
        (rates.network, rates.exec)
    };
    assert_eq!(rates("", &[]), (2000, 0));
    let file = format!("{OWN}subSecondProbes: {{networkRate: 0, execRate: 20}}\n");
    assert_eq!(rates(&file, &[]), (0, 20), "a rate of zero is no default");
    assert_eq!(rates(&file, &["--sub-second-probe-rate=7", "--sub-second-exec-probe-rate=0"]), (7, 0));
}

#[test]
fn fields_of_dns_arrive() {
    let file = "clusterDomain: c.local\nclusterDNS: [10.96.0.10, 10.96.0.11]\nresolvConf: \"\"\n";
    let settings = of(file, &[]);
    assert_eq!((settings.cluster_domain.as_str(), settings.resolv_conf), ("c.local", None));
    assert_eq!(settings.cluster_dns, ["10.96.0.10", "10.96.0.11"]);
    let settings = of(file, &["--cluster-dns", "10.0.0.1,10.0.0.2", "--resolv-conf", "/x"]);
    assert_eq!(settings.cluster_dns, ["10.0.0.1", "10.0.0.2"], "the kubelet's form with commas");
    assert_eq!(settings.resolv_conf, Some("/x".into()));
}

#[test]
fn fields_of_cgroups_arrive() {
    let file = "cgroupRoot: /q\ncgroupsPerQOS: false\nenforceNodeAllocatable: []\npodPidsLimit: 64\ncpuCFSQuota: false\n\
                cpuCFSQuotaPeriod: 10ms\n";
    let args = args(file, &[]);
    assert_eq!((args.cgroup_root.as_str(), args.resources.cgroups_per_qos), ("/q", false));
    let settings = settings(&args).unwrap();
    assert_eq!((settings.cgroup.pids_limit, settings.enforce_reserved), (64, false));
    let container: Container =
        serde_json::from_value(json!({"name": "c", "resources": {"limits": {"cpu": "1"}}})).unwrap();
    let pod = pod_of(json!({"containers": [container.clone()]}));
    let quota = |settings: &NodeSettings| {
        let resources = container_resources(&pod, &container, settings, &ContainerPlacement::default());
        (resources.cpu_period, resources.cpu_quota)
    };
    assert_eq!(quota(&settings), (0, 0));
    assert_eq!(quota(&of("cpuCFSQuotaPeriod: 10ms\n", &[])), (10_000, 10_000));
    assert_eq!(quota(&of("", &[])), (100_000, 100_000));
}

#[test]
fn fields_of_statistics_arrive() {
    let period = |file: &str, flags: &[&str]| args(file, flags).resources.volume_stats_agg_period.as_secs();
    assert_eq!(period("", &[]), 60);
    assert_eq!(period("volumeStatsAggPeriod: 0s\n", &[]), 60, "as if it was not there");
    assert_eq!(period("volumeStatsAggPeriod: 5m\n", &[]), 300);
    assert_eq!(period("volumeStatsAggPeriod: -1s\n", &[]), 0);
    assert_eq!(period("volumeStatsAggPeriod: 5m\n", &["--volume-stats-agg-period=-1m"]), 0, "a flag wins");
}

#[test]
fn fields_of_images_arrive() {
    let file = "imageGCHighThresholdPercent: 70\nimageGCLowThresholdPercent: 60\nimageMinimumGCAge: 3m\nimageMaximumGCAge: 4h\n\
                serializeImagePulls: false\nmaxParallelImagePulls: 3\nregistryPullQPS: 7\nregistryBurst: 9\n";
    let policy = args(file, &["--image-gc-low-threshold", "50"]).images.policy();
    assert_eq!((policy.high, policy.low), (70, 50), "a flag wins");
    let minutes = [policy.min_age, policy.max_age].map(|age| age.as_secs() / 60);
    assert_eq!(minutes, [3, 240]);
    let verified = |file: &str| args(file, &[]).pulls.verification();
    let policy = "imagePullCredentialsVerificationPolicy";
    for (file, want) in [
        (String::new(), VerificationPolicy::NeverVerifyPreloadedImages),
        (format!("{policy}: NeverVerify\n"), VerificationPolicy::NeverVerify),
        (format!("{policy}: AlwaysVerify\n"), VerificationPolicy::AlwaysVerify),
        (
            format!(
                "{policy}: NeverVerifyAllowlistedImages\npreloadedImagesVerificationAllowlist: [r.test/a, r.test/b/*]\n"
            ),
            VerificationPolicy::NeverVerifyAllowlistedImages(
                Allowlist::parse(&["r.test/a".to_owned(), "r.test/b/*".to_owned()]).unwrap(),
            ),
        ),
    ] {
        assert_eq!(verified(&file).unwrap(), want, "{file}");
    }
    let error = verified("preloadedImagesVerificationAllowlist: [r.test/a]\n").unwrap_err().to_string();
    assert!(error.contains("needs imagePullCredentialsVerificationPolicy"), "{error}");
    let pulls = args(file, &[]).pulls.settings();
    assert_eq!(
        (pulls.serialize, pulls.max_parallel, pulls.qps, pulls.burst),
        (Some(false), Some(3), Some(7), Some(9))
    );
    assert_eq!(
        args("", &[]).pulls.settings(),
        pod_sync_images::pulls::PullSettings::default(),
        "as if nothing were set"
    );
    assert_eq!(args("cgroupDriver: systemd\n", &[]).cgroup_driver, crate::args::CgroupDriver::Systemd);
}

#[test]
fn fields_of_security_arrive() {
    assert!(of("seccompDefault: true\n", &[]).seccomp_default && !of("", &[]).seccomp_default);
    assert!(of("seccompDefault: false\n", &["--seccomp-default"]).seccomp_default);
    assert!(of("singleProcessOOMKill: true\n", &[]).single_process_oom_kill);
    let mut given = args("singleProcessOOMKill: false\n", &[]);
    for v2 in [true, false] {
        let mut settings = NodeSettings {
            cgroup_v2: v2,
            memory_bytes: 1 << 30,
            single_process_oom_kill: !v2,
            ..NodeSettings::default()
        };
        assert_eq!(resources(&given, &mut settings).is_ok(), v2, "needs cgroup v2");
    }
    given.resources.single_process_oom_kill = None;
    assert_eq!(settings(&given).unwrap().single_process_oom_kill, !of("", &[]).cgroup_v2);
}

#[test]
fn images_of_the_node_arrive() {
    let most = |file: &str| args(file, &[]).resources.node_status_max_images;
    assert_eq!(["", "nodeStatusMaxImages: 0\n", "nodeStatusMaxImages: -1\n"].map(most), [50, 0, -1]);
}

#[test]
fn pods_are_as_many_as_the_node_and_its_cores_take() {
    for (cpus, most, per_core, want) in
        [(4, 110, 0, 110), (4, 110, 10, 40), (40, 110, 10, 110), (4, 5, 10, 5)]
    {
        assert_eq!(pod_sync_node_object::max_pods(cpus, most, per_core), want, "{cpus} {most} {per_core}");
    }
    let pods = |settings: &NodeSettings| pod_sync_node_object::capacity(settings)["pods"].0.clone();
    assert_eq!(pods(&of("maxPods: 7\n", &[])), "7");
    assert_eq!(pods(&of("maxPods: 7\n", &["--max-pods", "9"])), "9");
    assert_eq!(pods(&of("podsPerCore: 1\n", &[])), pod_sync_node_object::cpus().min(110).to_string());
    assert_eq!(pods(&of("", &[])), "110");
}

#[test]
fn what_is_reserved_is_kept_from_pods() {
    let file = "systemReserved: {cpu: 100m, memory: 16Mi, pid: \"100\"}\nkubeReserved: {cpu: 150m}\n";
    let settings = of(file, &[]);
    let whole = of("", &[]);
    let left = |settings: &NodeSettings, name: &str| {
        Quantity::of(&pod_sync_node_object::allocatable(settings)[name])
    };
    assert_eq!(left(&settings, "cpu").milli_value(), pod_sync_node_object::cpus() * 1000 - 250);
    assert_eq!(
        settings.allocatable["cpu"].milli_value(),
        pod_sync_node_object::cpus() * 1000 - 250,
        "for the downward API, too"
    );
    assert_eq!(left(&whole, "memory").value() - left(&settings, "memory").value(), 16 << 20);
    assert_eq!(
        pod_sync_node_object::capacity(&settings),
        pod_sync_node_object::capacity(&whole),
        "capacity is the machine"
    );
    let limits = pod_sync_node_object::pod_limits(&settings);
    assert_eq!(limits.cpu_milli, Some(pod_sync_node_object::cpus() * 1000 - 250));
    assert_eq!(limits.memory_bytes, Some(settings.memory_bytes - (16 << 20)));
    let pids = |settings: &NodeSettings| pod_sync_node_object::pod_limits(settings).pids.unwrap();
    assert_eq!(
        pids(&whole) - pids(&settings),
        100,
        "without a reservation, the limit is that of the machine"
    );
    let free = of(&format!("{file}enforceNodeAllocatable: [none]\n"), &[]);
    assert_eq!(pod_sync_node_object::pod_limits(&free), pod_sync_node_object::pod_limits(&whole));
    assert_eq!(left(&free, "cpu"), left(&settings, "cpu"));

    let error = super::settings(&args("kubeReserved: {memory: 1Ei}\n", &[])).unwrap_err().to_string();
    assert!(
        error.starts_with(
            "invalid Node Allocatable configuration. Resource \"memory\" has a reservation of 1Ei but"
        ),
        "{error}"
    );
    let cpus = format!("{file}reservedSystemCPUs: \"0\"\n");
    let cpus = of(&cpus, &[]);
    assert_eq!(left(&cpus, "cpu").milli_value(), pod_sync_node_object::cpus() * 1000 - 1000);
    let error = super::settings(&args("reservedSystemCPUs: \"65000\"\n", &[])).unwrap_err().to_string();
    assert!(error.starts_with("reserved-cpus: 65000 is not a subset of online-cpus: 0"), "{error}");
}

#[test]
fn what_hard_eviction_keeps_free_is_not_allocatable() {
    let kept = |file: &str, flags: &[&str], name: &str| {
        let settings = of(file, flags);
        let whole = Quantity::of(&pod_sync_node_object::capacity(&settings)[name]).value();
        whole - Quantity::of(&pod_sync_node_object::allocatable(&settings)[name]).value()
    };
    let disk = Quantity::of(&pod_sync_node_object::capacity(&of("", &[]))["ephemeral-storage"]).value();
    let huge: i64 = pod_sync_node_object::huge_pages(
        std::path::Path::new("/sys/kernel/mm/hugepages"),
        &of("", &[]).hugepage_sizes,
    )
    .into_values()
    .sum();
    assert_eq!(kept("", &[], "memory"), (100 << 20) + huge, "the default");
    // The kubelet stores percentages in 32 bits.
    let part =
        |percent: f32| Amount::Share(percent / 100.0).of(Quantity::from_units(disk, Format::Binary)).value();
    assert_eq!(kept("", &[], "ephemeral-storage"), part(10.0));
    let file =
        "evictionHard: {memory.available: 20Mi, nodefs.available: 25%}\nsystemReserved: {memory: 1Mi}\n";
    assert_eq!(kept(file, &[], "memory"), (21 << 20) + huge);
    assert_eq!(kept(file, &[], "ephemeral-storage"), part(25.0));
    let merged = "evictionHard: {nodefs.available: 25%}\n";
    assert_eq!(kept(merged, &[], "memory"), huge);
    let merged = format!("{merged}mergeDefaultEvictionSettings: true\n");
    assert_eq!(kept(&merged, &[], "memory"), (100 << 20) + huge);
    assert_eq!(
        kept(file, &["--eviction-hard=memory.available<30Mi"], "memory"),
        (31 << 20) + huge,
        "a flag wins"
    );
    let settings = of(file, &[]);
    let limits = pod_sync_node_object::pod_limits(&settings);
    assert_eq!(limits.memory_bytes, Some(settings.memory_bytes - (1 << 20)), "pods may use it until then");
    let error =
        super::settings(&args("evictionHard: {memory.available: 1Ei}\n", &[])).unwrap_err().to_string();
    assert!(error.starts_with("invalid Node Allocatable configuration. Resource \"memory\""), "{error}");
}

#[test]
fn without_isolation_of_local_storage_it_is_no_resource_of_the_node() {
    let off = "localStorageCapacityIsolation: false\nsystemReserved: {ephemeral-storage: 1Gi}\n";
    for (file, want) in [("", true), (off, false)] {
        let settings = of(file, &[]);
        let has = |list: &std::collections::BTreeMap<String, _>| list.contains_key("ephemeral-storage");
        let lists = [pod_sync_node_object::capacity(&settings), pod_sync_node_object::allocatable(&settings)];
        assert_eq!(lists.each_ref().map(has), [want; 2], "{file}");
        assert_eq!(settings.allocatable.contains_key("ephemeral-storage"), want, "{file}");
    }
}

#[test]
fn no_pod_gets_swap_unless_limited_swap_is_set() {
    let given = args("memorySwap: {swapBehavior: LimitedSwap}\n", &[]);
    for (v2, want) in [(true, Some(pod_sync_node_object::swap_bytes())), (false, None)] {
        let mut settings = NodeSettings { cgroup_v2: v2, memory_bytes: 1 << 30, ..NodeSettings::default() };
        resources(&given, &mut settings).unwrap();
        assert_eq!(settings.limited_swap_bytes, want, "cgroup v2: {v2}");
    }
    assert_eq!(of("", &[]).limited_swap_bytes, None);
}

#[test]
fn fields_of_memory_arrive_with_their_feature_gates() {
    let file = "memoryThrottlingFactor: 0.5\nqosReserved: {memory: 40%}\n";
    let gates = "featureGates: {QOSReserved: true}\nmemoryReservationPolicy: TieredReservation\n";
    let resources_of = |file: &str, v2: bool| {
        let mut settings = NodeSettings { cgroup_v2: v2, memory_bytes: 1 << 30, ..NodeSettings::default() };
        resources(&args(file, &[]), &mut settings).unwrap();
        let memory_qos = settings.memory_qos.map(|m| (m.throttling_factor, m.protects_requests));
        (memory_qos, settings.cgroup.protects_memory, settings.qos_reserved_percent)
    };
    assert_eq!(
        resources_of("", true),
        (Some((None, false)), false, None),
        "nothing is throttled or protected"
    );
    let off = "memoryThrottlingFactor: 0.9\nfeatureGates: {MemoryQoS: false}\n";
    assert_eq!(resources_of(off, true), (None, false, None), "the earlier default is no error");
    assert_eq!(resources_of(file, true), (Some((Some(0.5), false)), false, None));
    let with_gates = format!("{file}{gates}");
    assert_eq!(resources_of(&with_gates, true), (Some((Some(0.5), true)), true, Some(40)));
    assert_eq!(resources_of(&with_gates, false), (None, false, Some(40)), "cgroup v1 has no memory.high");
    let flag = ["--qos-reserved=memory=30%", "--feature-gates=QOSReserved=true"];
    assert_eq!(args(file, &flag).resources.qos_reserved_percent(), Some(30), "a flag wins");
}

#[test]
fn stop_signals_are_off_without_their_feature_gate() {
    let stop_signals = |file: &str| {
        let mut settings = NodeSettings { memory_bytes: 1 << 30, ..NodeSettings::default() };
        resources(&args(file, &[]), &mut settings).unwrap();
        settings.stop_signals
    };
    assert!(!stop_signals(""));
    assert!(stop_signals("featureGates: {ContainerStopSignals: true}\n"));
}

#[test]
fn the_gates_of_huge_pages_labels_device_health_and_the_pods_api_are_on_unless_they_are_switched_off() {
    let gates = |file: &str| {
        let resources = args(file, &[]).resources;
        [
            resources.subtracts_huge_pages(),
            resources.mounts_selinux_labels(),
            resources.serves_pods_api(),
            resources.reports_device_health(),
            resources.tolerates_user_namespace(),
        ]
    };
    assert_eq!(gates(""), [true; 5]);
    let names = [
        "HugepageAwareEviction",
        "SELinuxMount",
        "PodsAPI",
        "ResourceHealthStatus",
        "KubeletInUserNamespace",
    ];
    for (at, gate) in names.into_iter().enumerate() {
        let mut expected = [true; 5];
        expected[at] = false;
        assert_eq!(gates(&format!("featureGates: {{{gate}: false}}\n")), expected, "{gate}");
    }
}

#[test]
fn fields_of_cpus_and_numa_nodes_arrive() {
    use pod_sync_placement::{PlacementSettings, ReservedAmounts};
    let shown = |file: &str, flags: &[&str]| {
        let args = args(file, flags);
        let node = super::settings(&args).unwrap();
        let (reserved, eviction) = (&node.reserved, &node.eviction_reserve);
        let cpus = args.resources.reserved_cpus.as_str();
        let reserved = ReservedAmounts { reserved, eviction, cpus };
        let settings = args.placement.settings(&args.resources.feature_gates, reserved);
        (settings, args.placement.cpu_manager_reconcile_period)
    };
    let (default, period) = shown("", &[]);
    let names = |settings: &PlacementSettings| {
        let PlacementSettings { cpu_policy, memory_policy, topology_policy, topology_scope, .. } = *settings;
        [cpu_policy.as_str(), memory_policy.as_str(), topology_policy.as_str(), topology_scope.as_str()]
    };
    assert_eq!((names(&default), period.as_secs()), (["none", "None", "none", "container"], 10));
    assert!(!default.has_pod_level);
    assert!(default.cpu_gates.beta && !default.cpu_gates.alpha);
    let file = "cpuManagerPolicy: static\ncpuManagerPolicyOptions: {full-pcpus-only: \"true\"}\n\
                cpuManagerReconcilePeriod: 3s\nreservedSystemCPUs: \"0\"\nmemoryManagerPolicy: Static\n\
                reservedMemory: [{numaNode: 0, limits: {memory: 1Gi, hugepages-2Mi: 4Mi}}]\n\
                systemReserved: {memory: 924Mi}\nevictionHard: {memory.available: 100Mi}\n\
                topologyManagerPolicy: restricted\ntopologyManagerScope: pod\n\
                topologyManagerPolicyOptions: {max-allowable-numa-nodes: \"9\"}\n\
                featureGates: {CPUManagerPolicyAlphaOptions: true, PodLevelResourceManagers: true}\n";
    let (set, period) = shown(file, &[]);
    assert_eq!((names(&set), period.as_secs()), (["static", "Static", "restricted", "pod"], 3));
    assert!(set.has_pod_level);
    assert_eq!((set.cpu_options["full-pcpus-only"].as_str(), set.cpu_gates.alpha), ("true", true));
    assert_eq!((set.reserved_cpus.as_str(), set.reserved_milli_cpus), ("0", Some(1000)));
    let bytes = |amounts: &pod_sync_memory::Amounts| amounts.values().copied().collect::<Vec<_>>();
    assert_eq!(set.reserved_memory.values().map(bytes).collect::<Vec<_>>(), [[4 << 20, 1 << 30]]);
    assert_eq!(bytes(&set.memory_of_node), [1 << 30], "with the eviction threshold");
    assert_eq!(set.topology_options["max-allowable-numa-nodes"], "9");
    let flags = ["--cpu-manager-policy=static", "--reserved-memory=0:memory=1Gi;1:memory=2Gi"];
    let (flags, _) = shown("", &flags);
    assert_eq!((flags.cpu_policy.as_str(), flags.reserved_memory.len()), ("static", 2));
}

#[test]
fn feature_gates_of_fields_are_off_unless_they_are_switched_on() {
    let gates = |file: &str| {
        let gates = args(file, &[]).resources.field_gates();
        let probes = [gates.h2c_probes, gates.grpc_probe_tls];
        let resizes = [gates.memory_volume_resize, gates.scheduler_preempts_for_resizes];
        let volumes = [gates.bind_mount_options, gates.empty_dir_mode, gates.file_owners];
        [&probes[..], &volumes[..], &resizes].concat()
    };
    assert_eq!(gates(""), [false; 7]);
    let names = [
        "H2CContainerProbe",
        "GRPCContainerProbeTLS",
        "VolumeBindMountOptions",
        "EmptyDirVolumeMode",
        "AtomicWriteVolumeUserFields",
        "InPlacePodVerticalScalingMemoryBackedVolumes",
        "InPlacePodVerticalScalingSchedulerPreemption",
    ];
    for (at, gate) in names.into_iter().enumerate() {
        let mut expected = [false; 7];
        expected[at] = true;
        assert_eq!(gates(&format!("featureGates: {{{gate}: true}}\n")), expected, "{gate}");
    }
}

#[test]
fn sysctls_of_all_pods_arrive_with_their_feature_gate() {
    let sysctls = |file: &str, flags: &[&str]| -> Vec<(String, String)> {
        let mut settings = NodeSettings { memory_bytes: 1 << 30, ..NodeSettings::default() };
        resources(&args(file, flags), &mut settings).unwrap();
        settings.default_sysctls.into_iter().collect()
    };
    let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let file = "defaultPodSysctls: {net.core.somaxconn: \"7\", net.ipv4.tcp_rmem: 4096 87380 6291456}\n";
    assert_eq!(sysctls(file, &[]), []);
    let with_gate = format!("{file}featureGates: {{DefaultPodSysctls: true}}\n");
    let want = [pair("net.core.somaxconn", "7"), pair("net.ipv4.tcp_rmem", "4096 87380 6291456")];
    assert_eq!(sysctls(&with_gate, &[]), want);
    let flags = ["--default-pod-sysctls=net.ipv4.ip_forward=1", "--feature-gates=DefaultPodSysctls=true"];
    assert_eq!(sysctls("", &flags), [pair("net.ipv4.ip_forward", "1")]);
}

#[test]
fn volumes_have_projects_with_the_feature_gate() {
    let quotas = |file: &str| {
        let resources = args(file, &[]).resources;
        format!("{:?}", resources.project_quotas(std::path::Path::new("/r")))
    };
    assert_eq!(quotas(""), "ProjectQuotas(false)");
    let gate = "featureGates: {LocalStorageCapacityIsolationFSQuotaMonitoring: true}\n";
    assert_eq!(quotas(gate), "ProjectQuotas(true)");
}

#[test]
fn fields_of_the_machine_arrive() {
    let rules = |file: &str, flags: &[&str]| args(file, flags).machine.rules(false, false);
    let strict = rules("", &[]);
    assert!(strict.fail_swap_on && strict.fail_cgroup_v1 && strict.set_kernel_tunables);
    assert!(!strict.protect_kernel_defaults);
    let loose = rules(
        &format!(
            "failSwapOn: false\nfailCgroupV1: false\nprotectKernelDefaults: true\n{OWN}setKernelTunables: false\n"
        ),
        &[],
    );
    assert!(!loose.fail_swap_on && !loose.fail_cgroup_v1 && !loose.set_kernel_tunables);
    assert!(loose.protect_kernel_defaults);
    assert!(!rules("", &["--fail-swap-on=false"]).fail_swap_on, "a flag wins");
    let without =
        read::<Args>(Service::PodSync, vec!["pod-sync".into()]).unwrap().args.machine.rules(false, false);
    assert_eq!(without, pod_sync_node_object::MachineRules::default(), "without a file, any machine will do");
    let flag = read::<Args>(Service::PodSync, ["pod-sync", "--fail-swap-on"].map(Into::into).to_vec());
    assert!(flag.unwrap().args.machine.rules(false, false).fail_swap_on);
}

#[test]
fn fields_of_the_shutdown_arrive() {
    let plan = |file: &str, flags: &[&str]| args(file, flags).shutdown.plan().unwrap();
    assert!(plan("", &[]).is_disabled());
    let total = "shutdownGracePeriod: 30s\nshutdownGracePeriodCriticalPods: 10s\n";
    let seconds = Duration::from_secs;
    assert_eq!(plan(total, &[]), ShutdownPlan::from_total(seconds(30), seconds(10)));
    assert_eq!(
        plan(total, &["--shutdown-grace-period", "1m"]),
        ShutdownPlan::from_total(seconds(60), seconds(10))
    );
    let file = "shutdownGracePeriodByPodPriority:\n- {priority: 100, shutdownGracePeriodSeconds: 7}\n\
                - {priority: -5, shutdownGracePeriodSeconds: 8}\n";
    let share = |priority, seconds| PriorityGracePeriod { priority, seconds };
    let by_priority = ShutdownPlan::from_priorities(vec![share(-5, 8), share(100, 7)]);
    assert_eq!(plan(file, &[]), by_priority);
    assert_eq!(plan("", &["--shutdown-grace-period-by-pod-priority=100=7,-5=8"]), by_priority);
    for flags in [
        ["--shutdown-grace-period=1s", "--shutdown-grace-period-critical-pods=2s"],
        ["--shutdown-grace-period=1s", "--shutdown-grace-period-by-pod-priority=1=1"],
    ] {
        let given = <Args as clap::Parser>::try_parse_from([&["pod-sync"][..], &flags].concat()).unwrap();
        assert!(given.shutdown.plan().is_err(), "{flags:?}");
    }
}

#[test]
fn a_kubelet_that_takes_the_node_over_finds_no_label_of_ours_to_keep() {
    let held = |flags: &[&str]| {
        let node = pod_sync_node_object::managed_node(
            &of("", &[]),
            &args("", flags).labels(),
            &RuntimeState::default(),
        );
        (node.metadata.labels.unwrap(), node.metadata.annotations.unwrap())
    };
    let (labels, annotations) = held(&["--node-label=tier=edge"]);
    assert_eq!(labels.keys().collect::<Vec<_>>(), ["kubernetes.io/arch", "kubernetes.io/os"]);
    assert_eq!(annotations["quintlet.dev/version"], env!("CARGO_PKG_VERSION"));
    let (labels, _) = held(&["--node-label=quintlet.dev/beside-kubelet=true"]);
    assert_eq!(labels["quintlet.dev/beside-kubelet"], "true", "put back when it is taken away");
}

#[test]
fn an_unsafe_sysctl_is_admitted_where_it_is_allowed() {
    let pod = pod_of(json!({
        "containers": [{"name": "c"}],
        "securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]},
    }));
    let verdict = |file: &str| {
        let (_sender, runtime) = watch::channel(RuntimeState::default());
        let view = Arc::new(ClusterView::default());
        let (_shutdown, shutting_down) = watch::channel(false);
        let (_pressure, pressure) = watch::channel(BTreeSet::new());
        let conditions = NodeConditions { shutting_down, pressure };
        NodeAdmission::new(of(file, &[]), &args("", &[]).labels(), view, None, runtime, conditions)
            .admit(&pod, &[])
    };
    assert!(matches!(verdict(""), AdmitResult::Reject(_)));
    assert!(matches!(verdict("allowedUnsafeSysctls: [\"kernel.msg*\"]\n"), AdmitResult::Admit));
}
