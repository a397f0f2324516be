use quintlet_testkit::pods::pod_json;
use serde_json::{Value, json};

use super::*;

fn c(name: &str, requests: Value, limits: Value) -> Value {
    json!({"name": name, "image": "i", "resources": {"requests": requests, "limits": limits}})
}

fn pod(containers: Value) -> Pod {
    pod_json(json!({"containers": containers}))
}

#[test]
fn the_class_follows_requests_and_limits() {
    let full = json!({"cpu": "1", "memory": "1Gi"});
    for (name, spec, want) in [
        ("nothing", json!({"containers": [c("a", json!({}), json!({}))]}), QosClass::BestEffort),
        (
            "zero counts as nothing",
            json!({"containers": [c("a", json!({"cpu": "0"}), json!({}))]}),
            QosClass::BestEffort,
        ),
        (
            "other resources do not count",
            json!({"containers": [c("a", json!({"ephemeral-storage": "1Gi"}), json!({}))]}),
            QosClass::BestEffort,
        ),
        ("all equal", json!({"containers": [c("a", full.clone(), full.clone())]}), QosClass::Guaranteed),
        (
            "written otherwise",
            json!({"containers": [c("a", json!({"cpu": "1000m", "memory": "1024Mi"}), full.clone())]}),
            QosClass::Guaranteed,
        ),
        (
            "one without",
            json!({"containers": [c("a", full.clone(), full.clone()), c("b", json!({}), json!({}))]}),
            QosClass::Burstable,
        ),
        (
            "no memory limit",
            json!({"containers": [c("a", json!({"cpu": "1"}), json!({"cpu": "1"}))]}),
            QosClass::Burstable,
        ),
        (
            "request below limit",
            json!({"containers": [c("a", json!({"cpu": "500m", "memory": "1Gi"}), full.clone())]}),
            QosClass::Burstable,
        ),
        (
            "init without",
            json!({"containers": [c("a", full.clone(), full.clone())], "initContainers": [c("b", json!({}), json!({}))]}),
            QosClass::Burstable,
        ),
        (
            "pod level alone counts",
            json!({"containers": [c("a", json!({}), json!({}))], "resources": {"requests": full.clone(), "limits": full.clone()}}),
            QosClass::Guaranteed,
        ),
        (
            "pod level lower",
            json!({"containers": [c("a", full.clone(), full.clone())], "resources": {"requests": {"cpu": "1"}, "limits": full}}),
            QosClass::Burstable,
        ),
    ] {
        assert_eq!(compute_qos_class(&pod_json(spec)), want, "{name}");
    }
}

#[test]
fn the_qos_class_of_the_api_takes_precedence() {
    let mut p = pod(json!([c("a", json!({}), json!({}))]));
    p.status = Some(quintlet_testkit::pods::status_json(json!({"qosClass": "Guaranteed"})));
    assert_eq!(qos_class(&p), QosClass::Guaranteed);
}

#[test]
fn pod_requests_are_the_maximum_over_init_and_regular_containers() {
    let cpu = |name: &str, milli: &str, sidecar: bool| {
        let mut v = c(name, json!({"cpu": milli}), json!({}));
        if sidecar {
            v["restartPolicy"] = json!("Always");
        }
        v
    };
    for (name, containers, inits, want) in [
        ("sum", json!([cpu("a", "100m", false), cpu("b", "200m", false)]), json!([]), 300),
        ("big init", json!([cpu("a", "100m", false)]), json!([cpu("i", "500m", false)]), 500),
        ("small init", json!([cpu("a", "100m", false)]), json!([cpu("i", "50m", false)]), 100),
        ("sidecar adds", json!([cpu("a", "100m", false)]), json!([cpu("s", "50m", true)]), 150),
        (
            "init after sidecar",
            json!([cpu("a", "100m", false)]),
            json!([cpu("s", "50m", true), cpu("i", "200m", false)]),
            250,
        ),
        (
            "init before sidecar",
            json!([cpu("a", "100m", false)]),
            json!([cpu("i", "200m", false), cpu("s", "50m", true)]),
            200,
        ),
    ] {
        let p = pod_json(json!({"containers": containers, "initContainers": inits}));
        assert_eq!(pod_requests(&p)[CPU].milli_value(), want, "{name}");
    }
    let p = pod_json(json!({"containers": [cpu("a", "100m", false)], "overhead": {"cpu": "10m"},
        "resources": {"requests": {"cpu": "1"}}}));
    assert_eq!(pod_requests(&p)[CPU].milli_value(), 1010);
    assert!(!pod_limits(&p).contains_key(CPU));
}

#[test]
fn the_conversions_are_the_kubelets() {
    for (milli, shares) in [(0, 2), (1, 2), (2, 2), (100, 102), (1000, 1024), (1_000_000, 262_144)] {
        assert_eq!(milli_to_shares(milli), shares);
    }
    for (milli, quota) in [(0, 0), (1, 1000), (9, 1000), (10, 1000), (250, 25_000), (1500, 150_000)] {
        assert_eq!(milli_to_quota(milli, DEFAULT_PERIOD_US), quota);
    }
    for (shares, milli) in [(0, 0), (1, 0), (2, 2), (102, 100), (1024, 1000)] {
        assert_eq!(shares_to_milli(shares), milli);
    }
    assert_eq!(quota_to_milli(-1, 100_000), 0);
    assert_eq!(quota_to_milli(25_000, 100_000), 250);
    for (shares, weight) in [(2, 1), (1024, 39), (262_144, 10_000), (300_000, 10_000)] {
        assert_eq!(shares_to_weight(shares), weight);
    }
    assert_eq!(weight_to_shares(1), 2);
}

#[test]
fn a_burstable_pod_is_limited_only_if_every_container_is() {
    let both = json!([
        c("a", json!({"cpu": "100m"}), json!({"cpu": "1", "memory": "64Mi"})),
        c("b", json!({"cpu": "100m"}), json!({"cpu": "1"})),
    ]);
    let unprotected = PodCgroup { memory_min: Some(0), memory_low: Some(0), ..PodCgroup::default() };
    let got = pod_cgroup(&pod(both), CgroupSettings::default());
    assert_eq!(
        got,
        PodCgroup {
            cpu_shares: Some(204),
            cpu_quota_us: Some(200_000),
            cpu_period_us: Some(100_000),
            ..unprotected.clone()
        }
    );
    let none = pod_cgroup(&pod(json!([c("a", json!({}), json!({}))])), CgroupSettings::default());
    assert_eq!(none, PodCgroup { cpu_shares: Some(2), ..unprotected.clone() });
    let full = json!({"cpu": "1", "memory": "64Mi"});
    let settings = CgroupSettings { cfs_quota: false, pids_limit: 10, ..CgroupSettings::default() };
    let guaranteed = pod_cgroup(&pod(json!([c("a", full.clone(), full)])), settings);
    assert_eq!(
        guaranteed,
        PodCgroup {
            cpu_shares: Some(1024),
            cpu_quota_us: Some(-1),
            cpu_period_us: Some(100_000),
            memory_bytes: Some(64 << 20),
            pids: Some(10),
            ..unprotected
        }
    );
}

#[test]
fn the_oom_score_follows_class_and_memory_request() {
    let gib = 1_i64 << 30;
    let score = |spec: Value, index: usize| {
        let p = pod_json(spec);
        let all: Vec<Container> =
            pod::spec(&p).containers.iter().chain(pod::init_containers(&p)).cloned().collect();
        oom_score_adj(&p, &all[index], 4 * gib)
    };
    let full = json!({"cpu": "1", "memory": "1Gi"});
    assert_eq!(score(json!({"containers": [c("a", full.clone(), full.clone())]}), 0), -997);
    assert_eq!(score(json!({"containers": [c("a", json!({}), json!({}))]}), 0), 1000);
    assert_eq!(score(json!({"containers": [c("a", json!({"memory": "1Gi"}), json!({}))]}), 0), 750);
    assert_eq!(score(json!({"containers": [c("a", json!({"cpu": "1"}), json!({}))]}), 0), 999);
    assert_eq!(score(json!({"containers": [c("a", json!({"memory": "4Gi"}), json!({}))]}), 0), 3);
    let mut sidecar = c("s", json!({"memory": "1Mi"}), json!({}));
    sidecar["restartPolicy"] = json!("Always");
    let spec =
        json!({"containers": [c("a", json!({"memory": "1Gi"}), json!({}))], "initContainers": [sidecar]});
    assert_eq!(score(spec, 1), 750);
    let critical = json!({"containers": [c("a", json!({}), json!({}))],
        "priority": 2_000_001_000, "priorityClassName": "system-node-critical"});
    assert_eq!(score(critical, 0), -997);
}

#[test]
fn amounts_at_the_end_of_their_range_saturate_in_every_sum() {
    let most = i64::MAX.to_string();
    let resources = json!({"cpu": most, "memory": most});
    let all: Vec<Value> =
        (0..1000).map(|i| c(&format!("c{i}"), resources.clone(), resources.clone())).collect();
    let full = pod(json!(all));
    assert_eq!(pod_requests(&full)["memory"].value(), i64::MAX);
    assert_eq!(pod_limits(&full)["cpu"].milli_value(), i64::MAX);
    let asks = |own: &str, of_container: &str| {
        let containers = json!([c("c", json!({"memory": of_container}), json!({}))]);
        pod_json(json!({"containers": containers, "resources": {"requests": {"memory": own}}}))
    };
    for (own, of_container) in [
        (most.as_str(), most.as_str()),
        (most.as_str(), "-1"),
        ("-9223372036854775808", most.as_str()),
        (most.as_str(), "1"),
    ] {
        let p = asks(own, of_container);
        let score = oom_score_adj(&p, &pod::spec(&p).containers[0], 1);
        assert!((3..=1000).contains(&score), "{own} {of_container}: {score}");
    }
    // A share of what remains of the pod's request is added to the container's request.
    let both = json!([
        c("more", json!({"memory": most}), json!({})),
        c("less", json!({"memory": format!("-{most}")}), json!({})),
    ]);
    let p = pod_json(json!({"containers": both, "resources": {"requests": {"memory": most}}}));
    assert_eq!(oom_score_adj(&p, &pod::spec(&p).containers[0], 1), 3);
    assert!(weight_to_shares(u64::MAX) > MAX_SHARES);
}

#[test]
fn lower_qos_classes_leave_the_reserved_part_of_requests() {
    let pod = |resources: serde_json::Value| {
        pod_json(json!({"containers": [{"name": "c", "resources": resources}]}))
    };
    let guaranteed =
        pod(json!({"limits": {"cpu": "1", "memory": "2Gi"}, "requests": {"cpu": "1", "memory": "2Gi"}}));
    let burstable = pod(json!({"requests": {"cpu": "500m", "memory": "1Gi"}}));
    let best_effort = pod(json!({}));
    let pods = [&guaranteed, &burstable, &burstable, &best_effort];
    let none = QosTierSettings { allocatable_memory: 8 << 30, ..QosTierSettings::default() };
    let only_shares = QosTiers { burstable_shares: 1024, ..QosTiers::default() };
    assert_eq!(qos_tiers(pods, none), only_shares);
    let gib = |halves: i64| Some(halves << 29);
    for (percent, burstable_memory, best_effort_memory) in
        [(0, gib(16), gib(16)), (50, gib(14), gib(12)), (100, gib(12), gib(8))]
    {
        let settings = QosTierSettings { reserved_percent: Some(percent), ..none };
        let want = QosTiers { burstable_memory, best_effort_memory, ..only_shares };
        assert_eq!(qos_tiers(pods, settings), want, "{percent}%");
    }
    let full = QosTierSettings { reserved_percent: Some(100), allocatable_memory: 4 << 30, ..none };
    assert_eq!(qos_tiers(pods, full).best_effort_memory, None, "a limit of 0 is not written");
    let protected = QosTierSettings { protects_memory: Some(true), ..none };
    assert_eq!(
        qos_tiers(pods, protected),
        QosTiers { memory_min: gib(8), memory_low: gib(4), ..only_shares }
    );
    let unprotected = QosTierSettings { protects_memory: Some(false), ..none };
    assert_eq!(
        qos_tiers(pods, unprotected),
        QosTiers { memory_min: Some(0), memory_low: Some(0), ..only_shares },
        "an earlier protection is removed"
    );
    let settings = CgroupSettings { protects_memory: true, ..CgroupSettings::default() };
    let weight = |pod: &Pod| {
        let values = pod_cgroup(pod, settings);
        (values.memory_min, values.memory_low)
    };
    assert_eq!(weight(&guaranteed), (gib(4), Some(0)));
    assert_eq!(weight(&burstable), (Some(0), gib(2)));
    assert_eq!(weight(&best_effort), (Some(0), Some(0)));
}
