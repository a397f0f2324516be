//! `/metrics` and the pages below it.
//!
//! `/metrics` merges the metrics of all services and of this process. For a service that does not answer, its
//! last metrics are served; `quintlet_service_metrics_stale` reports that, and
//! `quintlet_service_metrics_age_seconds` their age.

pub(crate) mod features;
#[cfg(test)]
mod kubelet_families;
pub(crate) mod merge;
pub(crate) mod volumes;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use http::StatusCode;
use node_api_base::answer::{Answer, METRICS_TEXT, with_type};
use node_api_base::services::{Services, Source};
use parking_lot::Mutex;
use quintlet_model::kubernetes::MINOR_VERSION;
use tokio::time::Instant;

use merge::{Part, merge};

/// Age at which the metrics of a probe-service instance that is gone are dropped.
const MAX_AGE_OF_GONE: Duration = Duration::from_secs(300);
/// Age from which metrics are not from this scrape.
const STALE_AGE: f64 = 1.0;

/// The last metrics of a service, with the time of the scrape; none if the service never answered.
type LastMetrics = Option<(Instant, String)>;

/// The last metrics of each service.
#[derive(Debug, Default)]
pub(crate) struct MetricsCache {
    last: Mutex<BTreeMap<Source, (Instant, String)>>,
}

impl MetricsCache {
    /// Scrapes all services. Returns the last metrics of each service, also of those that do not answer.
    async fn scrape(&self, node: &Services) -> Vec<(Source, LastMetrics)> {
        let sources = node.sources().await;
        let answers = futures::future::join_all(sources.iter().map(|source| node.metrics(source))).await;
        let now = Instant::now();
        let mut last = self.last.lock();
        for (source, answer) in sources.iter().zip(answers) {
            if let Ok(text) = answer {
                last.insert(source.clone(), (now, text));
            }
        }
        last.retain(|source, (at, _)| sources.contains(source) || now.duration_since(*at) < MAX_AGE_OF_GONE);
        let mut all: BTreeMap<Source, LastMetrics> =
            sources.into_iter().map(|source| (source, None)).collect();
        all.extend(last.iter().map(|(source, metrics)| (source.clone(), Some(metrics.clone()))));
        all.into_iter().collect()
    }

    /// Responds with the merged metrics and the family of feature gates.
    pub(crate) async fn page(&self, node: &Services, node_name: &str, features: &str) -> Answer {
        let (scraped, storage) = tokio::join!(self.scrape(node), node.storage());
        let own = quintlet_telemetry::metrics::text();
        let mut parts = parts(&scraped);
        parts.push(Part { service: "node-api", instance: "", text: &own });
        let mut out = merge(&parts);
        write_service_state(&mut out, &scraped, Instant::now());
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
             kubernetes_build_info{{git_version=\"v{}\",major=\"1\",minor=\"{}\",platform=\"linux\"}} 1",
            env!("CARGO_PKG_VERSION"),
            MINOR_VERSION.trim_start_matches("1.")
        );
        with_type(StatusCode::OK, METRICS_TEXT, out)
    }

    /// Responds with the metrics of probes, and with the start time of this process.
    pub(crate) async fn probes(&self, node: &Services, started: jiff::Timestamp) -> Answer {
        let mut scraped = self.scrape(node).await;
        scraped.retain(|(source, _)| source.service == "probe-service");
        let mut out = merge::only(&merge(&parts(&scraped)), |name| name.starts_with("prober_"));
        write_service_state(&mut out, &scraped, Instant::now());
        // Writing to a String does not fail.
        let _ = writeln!(
            out,
            "# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.\n\
             # TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {}",
            started.as_duration().as_secs_f64()
        );
        with_type(StatusCode::OK, METRICS_TEXT, out)
    }
}

fn parts(scraped: &[(Source, LastMetrics)]) -> Vec<Part<'_>> {
    let answered = scraped.iter().filter_map(|(source, metrics)| Some((source, &metrics.as_ref()?.1)));
    answered
        .map(|(source, text)| Part { service: &source.service, instance: &source.instance, text })
        .collect()
}

fn write_service_state(out: &mut String, scraped: &[(Source, LastMetrics)], now: Instant) {
    let age = |metrics: &LastMetrics| metrics.as_ref().map(|(at, _)| now.duration_since(*at).as_secs_f64());
    let is_stale = |metrics: &LastMetrics| age(metrics).is_none_or(|age| age > STALE_AGE);
    let mut family = |name: &str, help: &str, value: &dyn Fn(&LastMetrics) -> Option<f64>| {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} gauge");
        for (source, metrics) in scraped {
            if let Some(value) = value(metrics) {
                let labels = merge::source_labels(&source.service, &source.instance);
                let _ = writeln!(out, "{name}{{{labels}}} {value}");
            }
        }
    };
    let flag = |yes: bool| Some(f64::from(u8::from(yes)));
    family("quintlet_service_up", "1 if the service answered this scrape", &|metrics| {
        flag(!is_stale(metrics))
    });
    family(
        "quintlet_service_metrics_stale",
        "1 if the service did not answer and its metrics are from an earlier scrape",
        &|metrics| flag(is_stale(metrics)),
    );
    family("quintlet_service_metrics_age_seconds", "Age of the service's metrics", &age);
}
