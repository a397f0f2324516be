//! `/metrics/resource`, and the Prometheus text format.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use jiff::Timestamp;
use node_api_base::pod_lookup;
use quintlet_cri_api::v1;
use serde_json::Value;

use super::gather::{Pod, newest, pod_swap};
use super::machine::Machine;

/// Returns the metrics of the node and its pods. `None` if the pods are not known:
/// the page says only that.
pub(super) fn resources(node: Option<(Machine, &[Pod])>) -> String {
    let mut out = Text::default();
    let has_pods = node.is_some();
    if let Some((m, pods)) = node {
        let ms = Some(m.time.as_millisecond());
        out.sample("node_cpu_usage_seconds_total", "counter", "", seconds(m.cpu_nanos), ms);
        out.sample("node_memory_working_set_bytes", "gauge", "", whole(m.working_set()), ms);
        let swap = m.of("SwapTotal").saturating_sub(m.of("SwapFree"));
        out.sample("node_swap_usage_bytes", "gauge", "", whole(swap), ms);
        for pod in pods {
            let labels = labels([("namespace", &pod.namespace), ("pod", &pod.name)]);
            out.usage("pod", &labels, pod.stats.cpu.as_ref(), pod.stats.memory.as_ref());
            if let Some(swap) = pod_swap(pod) {
                let at = Some(swap.timestamp / 1_000_000);
                let used = swap.swap_usage_bytes.map_or(0, |b| b.value);
                out.sample("pod_swap_usage_bytes", "gauge", &labels, whole(used), at);
            }
            for (name, c) in newest(&pod.stats.containers) {
                let labels =
                    self::labels([("container", name), ("namespace", &pod.namespace), ("pod", &pod.name)]);
                out.usage("container", &labels, c.cpu.as_ref(), c.memory.as_ref());
                if let Some(started) = started(&pod.object, name) {
                    out.sample("container_start_time_seconds", "gauge", &labels, started, None);
                }
                out.swap(&labels, c.swap.as_ref());
            }
        }
    }
    out.sample("resource_scrape_error", "gauge", "", if has_pods { 0.0 } else { 1.0 }, None);
    out.finish()
}

pub(super) fn started(pod: &Value, container: &str) -> Option<f64> {
    let text = pod_lookup::status(pod, container)?["state"]["running"]["startedAt"].as_str()?;
    let at = text.parse::<Timestamp>().ok()?.as_second();
    #[expect(clippy::cast_precision_loss, reason = "seconds since 1970 fit")]
    (at > 0).then_some(at as f64)
}

/// Samples by metric family, in the order of insertion.
#[derive(Debug, Default)]
pub(super) struct Text(BTreeMap<&'static str, (&'static str, String)>);

impl Text {
    pub(super) fn sample(
        &mut self,
        name: &'static str,
        kind: &'static str,
        labels: &str,
        value: f64,
        ms: Option<i64>,
    ) {
        let (_, lines) = self.0.entry(name).or_insert_with(|| (kind, String::new()));
        let labels = if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
        let at = ms.map(|ms| format!(" {ms}")).unwrap_or_default();
        // Writing to a String does not fail.
        let _ = writeln!(lines, "{name}{labels} {value}{at}");
    }

    pub(super) fn usage(
        &mut self,
        subject: &str,
        labels: &str,
        cpu: Option<&v1::CpuUsage>,
        memory: Option<&v1::MemoryUsage>,
    ) {
        let (cpu_name, memory_name) = if subject == "pod" {
            ("pod_cpu_usage_seconds_total", "pod_memory_working_set_bytes")
        } else {
            ("container_cpu_usage_seconds_total", "container_memory_working_set_bytes")
        };
        if let Some((value, at)) = cpu.and_then(|c| Some((c.usage_core_nano_seconds?.value, c.timestamp))) {
            self.sample(cpu_name, "counter", labels, seconds(value), Some(at / 1_000_000));
        }
        if let Some((value, at)) = memory.and_then(|m| Some((m.working_set_bytes?.value, m.timestamp))) {
            self.sample(memory_name, "gauge", labels, whole(value), Some(at / 1_000_000));
        }
    }

    fn swap(&mut self, labels: &str, swap: Option<&v1::SwapUsage>) {
        let Some((used, swap)) = swap.and_then(|s| Some((s.swap_usage_bytes?.value, s))) else { return };
        let at = Some(swap.timestamp / 1_000_000);
        self.sample("container_swap_usage_bytes", "gauge", labels, whole(used), at);
        // A runtime that reports no available bytes knows no limit.
        if let Some(left) = swap.swap_available_bytes {
            let limit = used.saturating_add(left.value);
            self.sample("container_swap_limit_bytes", "gauge", labels, whole(limit), at);
        }
    }

    pub(super) fn finish(self) -> String {
        let family = |(name, (kind, lines)): (&str, (&str, String))| {
            let help = name.replace('_', " ");
            format!("# HELP {name} {help}\n# TYPE {name} {kind}\n{lines}")
        };
        self.0.into_iter().map(family).collect()
    }
}

pub(super) fn labels<const N: usize>(pairs: [(&str, &str); N]) -> String {
    pairs.map(|(name, value)| format!("{name}=\"{}\"", escape(value))).join(",")
}

pub(super) fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[expect(clippy::cast_precision_loss, reason = "metrics are floats")]
pub(super) fn whole(value: u64) -> f64 {
    value as f64
}

pub(super) fn seconds(nanos: u64) -> f64 {
    whole(nanos) / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resource_samples_have_the_time_of_their_measurement() {
        let cpu = v1::CpuUsage {
            timestamp: 1_700_000_000_123_456_789,
            usage_core_nano_seconds: Some(v1::UInt64Value { value: 1_500_000_000 }),
            ..Default::default()
        };
        let mut text = Text::default();
        text.usage("container", &labels([("container", "a\"b"), ("pod", "p")]), Some(&cpu), None);
        assert_eq!(
            text.finish(),
            "# HELP container_cpu_usage_seconds_total container cpu usage seconds total\n\
             # TYPE container_cpu_usage_seconds_total counter\n\
             container_cpu_usage_seconds_total{container=\"a\\\"b\",pod=\"p\"} 1.5 1700000000123\n"
        );
    }

    #[test]
    fn swap_has_its_limit_and_that_of_a_pod_is_the_sum_of_its_containers() {
        let bytes = |value| Some(v1::UInt64Value { value });
        let container = |name: &str, at: i64, used: u64| v1::ContainerStats {
            attributes: Some(v1::ContainerAttributes {
                metadata: Some(v1::ContainerMetadata { name: name.into(), attempt: 0 }),
                ..Default::default()
            }),
            swap: Some(v1::SwapUsage {
                timestamp: at * 1_000_000,
                swap_usage_bytes: bytes(used),
                swap_available_bytes: bytes(100),
            }),
            ..Default::default()
        };
        let mut pod = Pod {
            name: "p".into(),
            namespace: "n".into(),
            uid: "u".into(),
            object: Value::Null,
            stats: v1::LinuxPodSandboxStats {
                containers: vec![container("a", 5, 10), container("b", 4, 20)],
                ..Default::default()
            },
            ..Pod::default()
        };
        let swap = pod_swap(&pod).unwrap();
        assert_eq!((swap.timestamp, swap.swap_usage_bytes), (4_000_000, bytes(30)));
        let mut text = Text::default();
        text.swap("", pod.stats.containers[0].swap.as_ref());
        let text = text.finish();
        assert!(text.contains("container_swap_usage_bytes 10 5\n"), "{text}");
        assert!(text.contains("container_swap_limit_bytes 110 5\n"), "{text}");
        pod.stats.containers[0].swap = None;
        assert_eq!(pod_swap(&pod), None, "a part is not the whole");
    }
}
