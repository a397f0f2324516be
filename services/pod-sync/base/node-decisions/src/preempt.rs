//! Selects pods to preempt for a critical pod (`pkg/kubelet/preemption: getPodsToPreempt`).

use k8s_openapi::api::core::v1::Pod;
use quintlet_model::pod;
use quintlet_model::qos::{self, QosClass};

use super::admission::InsufficientResource;

/// Reason of a preempted pod's event and status.
pub const PREEMPTING: &str = "Preempting";
/// Message of a preempted pod's event and status.
pub const PREEMPTED_MESSAGE: &str = "Preempted in order to admit critical pod";
/// Message of a preempted pod's DisruptionTarget condition.
pub const DISRUPTION_MESSAGE: &str = "Pod was preempted by Kubelet to accommodate a critical pod.";

/// No set of pods frees enough resources. The message is that of the UnexpectedAdmissionError.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "Unexpected error while attempting to recover from admission failure: preemption: error finding a set of pods to preempt: no set of running pods found to reclaim resources: {0}"
)]
pub struct NoVictims(String);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Need {
    resource: String,
    quantity: i64,
}

fn request(pod: &Pod, resource: &str) -> i64 {
    if resource == "pods" {
        return 1;
    }
    let amount = qos::pod_requests(pod).get(resource).copied().unwrap_or_default();
    if resource == "cpu" { amount.milli_value() } else { amount.value() }
}

fn after(needs: &[Need], pods: &[&Pod]) -> Vec<Need> {
    needs
        .iter()
        .map(|n| {
            let freed = pods.iter().map(|p| request(p, &n.resource)).fold(0_i64, i64::saturating_add);
            Need { resource: n.resource.clone(), quantity: n.quantity.saturating_sub(freed) }
        })
        .filter(|n| n.quantity > 0)
        .collect()
}

fn text(needs: &[Need]) -> String {
    let items: String = needs.iter().map(|n| format!("(res: {}, q: {}), ", n.resource, n.quantity)).collect();
    format!("[{items}]")
}

/// Returns whether a pod may be preempted for another (`pkg/kubelet/types: Preemptable`).
#[must_use]
pub fn preemptable(preemptor: &Pod, victim: &Pod) -> bool {
    if pod::is_critical(preemptor) && !pod::is_critical(victim) {
        return true;
    }
    match (pod::spec(preemptor).priority, pod::spec(victim).priority) {
        (Some(a), Some(b)) => a > b,
        (Some(_) | None, _) => false,
    }
}

// Greedy by the amounts that would remain to be freed, each resource with the same weight; of equals, the
// pod that requests less.
fn choose(mut pods: Vec<&Pod>, mut needs: Vec<Need>) -> Vec<&Pod> {
    let distance = |pod: &Pod, needs: &[Need]| -> f64 {
        needs
            .iter()
            .map(|n| {
                let left = n.quantity.saturating_sub(request(pod, &n.resource)).max(0);
                #[expect(clippy::cast_precision_loss, reason = "a ratio, compared only")]
                let part = left as f64 / n.quantity as f64;
                part * part
            })
            .sum()
    };
    let mut chosen = Vec::new();
    while !needs.is_empty() && !pods.is_empty() {
        let best = (0..pods.len()).min_by(|a, b| {
            let (a, b) = (pods[*a], pods[*b]);
            distance(a, &needs)
                .total_cmp(&distance(b, &needs))
                .then_with(|| request(a, "memory").cmp(&request(b, "memory")))
                .then_with(|| request(a, "cpu").cmp(&request(b, "cpu")))
        });
        let Some(best) = best else { break };
        let pod = pods.remove(best);
        needs = after(&needs, &[pod]);
        chosen.push(pod);
    }
    chosen
}

/// Selects active pods to preempt, as few of the higher QoS classes as possible.
///
/// # Errors
/// All pods together do not free enough resources.
pub fn pods_to_preempt<'a>(
    preemptor: &Pod,
    active: &[&'a Pod],
    short: &[InsufficientResource],
) -> Result<Vec<&'a Pod>, NoVictims> {
    let needs: Vec<Need> = short
        .iter()
        .map(|s| Need { resource: s.resource.clone(), quantity: s.shortfall() })
        .filter(|n| n.quantity > 0)
        .collect();
    let victims = |class: QosClass| -> Vec<&'a Pod> {
        active.iter().copied().filter(|p| qos::qos_class(p) == class && preemptable(preemptor, p)).collect()
    };
    let best_effort = victims(QosClass::BestEffort);
    let burstable = victims(QosClass::Burstable);
    let guaranteed = victims(QosClass::Guaranteed);
    let all = [best_effort.clone(), burstable.clone(), guaranteed.clone()].concat();
    let impossible = after(&needs, &all);
    if !impossible.is_empty() {
        return Err(NoVictims(text(&impossible)));
    }
    let lower = [best_effort.clone(), burstable.clone()].concat();
    let high = choose(guaranteed, after(&needs, &lower));
    let middle = choose(burstable, after(&needs, &[best_effort.clone(), high.clone()].concat()));
    let low = choose(best_effort, after(&needs, &[middle.clone(), high.clone()].concat()));
    Ok([low, middle, high].concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use quintlet_testkit::pods::pod_json;
    use serde_json::{Value, json};

    fn pod(name: &str, requests: Value, limits: Value, priority: Option<i32>) -> Pod {
        let mut p = pod_json(json!({"containers": [{"name": "c", "image": "i",
            "resources": {"requests": requests, "limits": limits}}]}));
        p.metadata.name = Some(name.to_owned());
        p.spec.as_mut().unwrap().priority = priority;
        p
    }

    fn critical() -> Pod {
        pod("critical", json!({"cpu": "1"}), json!({}), Some(2_000_000_000))
    }

    fn short(list: &[(&str, i64)]) -> Vec<InsufficientResource> {
        let one = |(r, q): &(&str, i64)| InsufficientResource {
            resource: (*r).to_owned(),
            requested: *q,
            used: 0,
            capacity: 0,
        };
        list.iter().map(one).collect()
    }

    fn names(result: &Result<Vec<&Pod>, NoVictims>) -> Vec<String> {
        result.as_ref().unwrap().iter().map(|p| p.metadata.name.clone().unwrap()).collect()
    }

    #[test]
    fn lower_classes_go_first_and_no_more_than_needed() {
        let full = json!({"cpu": "1", "memory": "1Gi"});
        let g = pod("guaranteed", full.clone(), full, None);
        let b1 = pod("burstable-500", json!({"cpu": "500m"}), json!({}), None);
        let b2 = pod("burstable-300", json!({"cpu": "300m"}), json!({}), None);
        let e = pod("best-effort", json!({}), json!({}), None);
        let all = [&g, &b1, &b2, &e];
        for (name, need, want) in [
            ("exact", short(&[("cpu", 300)]), vec!["burstable-300"]),
            ("the larger", short(&[("cpu", 400)]), vec!["burstable-500"]),
            ("both", short(&[("cpu", 600)]), vec!["burstable-500", "burstable-300"]),
            ("guaranteed needed", short(&[("cpu", 900)]), vec!["guaranteed"]),
            ("a place", short(&[("pods", 1)]), vec!["best-effort"]),
            ("memory too", short(&[("cpu", 300), ("memory", 1)]), vec!["guaranteed"]),
        ] {
            assert_eq!(names(&pods_to_preempt(&critical(), &all, &need)), want, "{name}");
        }
    }

    #[test]
    fn critical_pods_are_not_preempted_and_the_error_names_the_insufficient_resources() {
        let other = pod("other", json!({"cpu": "5"}), json!({}), Some(2_000_000_000));
        let small = pod("small", json!({"cpu": "100m"}), json!({}), Some(5));
        let got = pods_to_preempt(&critical(), &[&other, &small], &short(&[("cpu", 300)]));
        assert!(got.unwrap_err().to_string().ends_with("to reclaim resources: [(res: cpu, q: 200), ]"));
        let higher = pod("higher", json!({}), json!({}), Some(2_000_001_000));
        assert!(preemptable(&higher, &other));
        assert!(!preemptable(&other, &higher));
        assert!(!preemptable(&small, &pod("x", json!({}), json!({}), None)));
    }
}
