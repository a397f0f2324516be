//! `/metrics` and the pages below it.
//!
//! `/metrics` merges the metrics of all services and of this process. For a service that does not answer, its last metrics are served;
//! `quintlet_service_metrics_stale` reports that, and `quintlet_service_metrics_age_seconds` their age.

pub mod features;
pub mod merge;
pub mod volumes;

use std::collections::BTreeMap;
use std::fmt::Write as _;

use http::StatusCode;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::answer::{Answer, with_type};
use crate::services::{Services, Source};
use merge::{Part, merge};

/// Content type of the Prometheus text format.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";
/// Age at which metrics of a missing probe-service instance are dropped.
const FORGET: std::time::Duration = std::time::Duration::from_secs(300);

/// The last metrics of each service.
#[derive(Debug, Default)]
pub struct MetricsCache {
    last: Mutex<BTreeMap<Source, (Instant, String)>>,
}

impl MetricsCache {
    /// Requests the metrics of all services and stores them.
    async fn ask(&self, node: &Services) -> Vec<(Source, Option<(Instant, String)>)> {
        let sources = node.sources();
        let answers = futures::future::join_all(sources.iter().map(|source| node.metrics(source))).await;
        let now = Instant::now();
        let mut last = self.last.lock();
        for (source, answer) in sources.iter().zip(answers) {
            if let Ok(text) = answer {
                last.insert(source.clone(), (now, text));
            }
        }
        last.retain(|source, (at, _)| sources.contains(source) || now.duration_since(*at) < FORGET);
        let mut all: BTreeMap<Source, Option<(Instant, String)>> =
            sources.into_iter().map(|source| (source, None)).collect();
        all.extend(last.iter().map(|(source, seen)| (source.clone(), Some(seen.clone()))));
        all.into_iter().collect()
    }

    /// Responds with the merged metrics and the family of feature gates.
    pub async fn page(&self, node: &Services, node_name: &str, features: &str) -> Answer {
        let (seen, storage) = tokio::join!(self.ask(node), node.storage());
        let own = quintlet_telemetry::metrics::text();
        let mut parts: Vec<Part<'_>> = seen
            .iter()
            .filter_map(|(source, seen)| {
                let (_, text) = seen.as_ref()?;
                Some(Part { service: &source.service, instance: &source.instance, text })
            })
            .collect();
        parts.push(Part { service: "node-api", instance: "", text: &own });
        let mut out = merge(&parts);
        write_service_state(&mut out, &seen, Instant::now());
        out.push_str(features);
        match storage {
            Ok(storage) => out.push_str(&volumes::text(&storage.pods)),
            // `quintlet_service_up` reports a pod-sync that does not answer.
            Err(status) => tracing::debug!(error = status.message(), "failed to get volume statistics"),
        }
        // Writing to a String does not fail.
        let _ = writeln!(
            out,
            "# HELP kubelet_node_name The node's name. The count is always 1.\n# TYPE kubelet_node_name gauge\n\
             kubelet_node_name{{node=\"{node_name}\"}} 1\n\
             # HELP kubernetes_build_info A metric with a constant '1' value labeled by version.\n\
             # TYPE kubernetes_build_info gauge\n\
             kubernetes_build_info{{git_version=\"v{}\",major=\"1\",minor=\"36\",platform=\"linux\"}} 1",
            env!("CARGO_PKG_VERSION")
        );
        with_type(StatusCode::OK, CONTENT_TYPE, out)
    }

    /// Responds with the metrics of probes, and with the start time of this process.
    pub async fn probes(&self, node: &Services, started: jiff::Timestamp) -> Answer {
        let mut seen = self.ask(node).await;
        seen.retain(|(source, _)| source.service == "probe-service");
        let parts: Vec<Part<'_>> = seen
            .iter()
            .filter_map(|(source, seen)| {
                let (_, text) = seen.as_ref()?;
                Some(Part { service: &source.service, instance: &source.instance, text })
            })
            .collect();
        let mut out = merge::only(&merge(&parts), |name| name.starts_with("prober_"));
        write_service_state(&mut out, &seen, Instant::now());
        // Writing to a String does not fail.
        let _ = writeln!(
            out,
            "# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.\n\
             # TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {}",
            started.as_duration().as_secs_f64()
        );
        with_type(StatusCode::OK, CONTENT_TYPE, out)
    }
}

type Seen = Option<(Instant, String)>;

fn write_service_state(out: &mut String, seen: &[(Source, Seen)], now: Instant) {
    let age = |seen: &Seen| seen.as_ref().map(|(at, _)| now.duration_since(*at).as_secs_f64());
    // Answers to this scrape are a moment old.
    let is_stale = |seen: &Seen| age(seen).is_none_or(|a| a > 1.0);
    let mut family = |name: &str, help: &str, value: &dyn Fn(&Seen) -> Option<f64>| {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} gauge");
        for (source, seen) in seen {
            if let Some(value) = value(seen) {
                let labels = merge::source_labels(&source.service, &source.instance);
                let _ = writeln!(out, "{name}{{{labels}}} {value}");
            }
        }
    };
    let flag = |yes: bool| Some(f64::from(u8::from(yes)));
    family("quintlet_service_up", "1 if the service answered this scrape", &|s| flag(!is_stale(s)));
    family(
        "quintlet_service_metrics_stale",
        "1 if the service did not answer and its metrics are from an earlier scrape",
        &|s| flag(is_stale(s)),
    );
    family("quintlet_service_metrics_age_seconds", "Age of the service's metrics", &age);
}
