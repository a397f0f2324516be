//! `kubernetes_feature_enabled`: the feature gates that this node behaves as having
//! (`staging/src/k8s.io/component-base/metrics/prometheus/feature`).

use std::fmt::Write as _;

use quintlet_config::table::{GATES, SETTABLE};

/// Returns the metric family. `is_on` returns whether a configurable gate is on, by its name and default.
#[must_use]
pub(crate) fn text(is_on: impl Fn(&str, bool) -> bool) -> String {
    let mut out = String::from(
        "# HELP kubernetes_feature_enabled This metric records the data about the stage and enablement of a k8s feature.\n\
         # TYPE kubernetes_feature_enabled gauge\n",
    );
    let fixed = GATES.iter().map(|gate| (gate, gate.fixed));
    let mut gates: Vec<_> =
        SETTABLE.iter().map(|gate| (gate, is_on(gate.name, gate.fixed))).chain(fixed).collect();
    gates.sort_by_key(|(gate, _)| gate.name);
    for (gate, on) in gates {
        // Writing to a String does not fail.
        let _ = writeln!(
            out,
            "kubernetes_feature_enabled{{name=\"{}\",stage=\"{}\"}} {}",
            gate.name,
            gate.stage,
            u8::from(on)
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_gate_has_its_stage_and_its_configured_value() {
        let by_default = text(|_, default| default);
        for line in [
            "kubernetes_feature_enabled{name=\"ContainerCheckpoint\",stage=\"BETA\"} 1",
            "kubernetes_feature_enabled{name=\"PodLogsQuerySplitStreams\",stage=\"ALPHA\"} 0",
            "kubernetes_feature_enabled{name=\"DRANodeAllocatableResources\",stage=\"ALPHA\"} 0",
            "kubernetes_feature_enabled{name=\"InPlacePodVerticalScalingInitContainers\",stage=\"\"} 1",
            "kubernetes_feature_enabled{name=\"ResourceHealthStatusMessage\",stage=\"BETA\"} 1",
        ] {
            assert!(by_default.lines().any(|l| l == line), "{line}\n{by_default}");
        }
        assert!(!by_default.contains("\"SidecarContainers\""), "kubelet 1.37 has removed the gate");
        let set = text(|name, default| if name == "PodLogsQuerySplitStreams" { true } else { default });
        assert!(set.contains("{name=\"PodLogsQuerySplitStreams\",stage=\"ALPHA\"} 1\n"), "{set}");
        let samples = by_default.lines().filter(|l| !l.starts_with('#')).count();
        assert_eq!(samples, GATES.len() + SETTABLE.len());
    }
}
