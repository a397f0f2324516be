//! `kubernetes_feature_enabled`: which gates this node behaves as having (staging/src/k8s.io/component-base/metrics/prometheus/feature).

use std::fmt::Write as _;

use quintlet_config::table::{DEFAULTS, GATES};

/// The family; `is_on` tells a gate that can be set, by its name and default.
#[must_use]
pub fn text(is_on: impl Fn(&str, bool) -> bool) -> String {
    let mut out = String::from(
        "# HELP kubernetes_feature_enabled This metric records the data about the stage and enablement of a k8s feature.\n\
         # TYPE kubernetes_feature_enabled gauge\n",
    );
    let fixed = GATES.iter().map(|gate| (gate, gate.fixed));
    let mut gates: Vec<_> =
        DEFAULTS.iter().map(|gate| (gate, is_on(gate.name, gate.fixed))).chain(fixed).collect();
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
    fn each_gate_is_told_with_its_stage_and_those_that_are_set_as_they_are_set() {
        let by_default = text(|_, default| default);
        for line in [
            "kubernetes_feature_enabled{name=\"ContainerCheckpoint\",stage=\"BETA\"} 1",
            "kubernetes_feature_enabled{name=\"PodLogsQuerySplitStreams\",stage=\"ALPHA\"} 0",
            "kubernetes_feature_enabled{name=\"SidecarContainers\",stage=\"\"} 1",
        ] {
            assert!(by_default.lines().any(|l| l == line), "{line}\n{by_default}");
        }
        let set = text(|name, default| if name == "PodLogsQuerySplitStreams" { true } else { default });
        assert!(set.contains("{name=\"PodLogsQuerySplitStreams\",stage=\"ALPHA\"} 1\n"), "{set}");
        let samples = by_default.lines().filter(|l| !l.starts_with('#')).count();
        assert_eq!(samples, GATES.len() + DEFAULTS.len());
    }
}
