//! What is counted.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use quintlet_telemetry::metrics::{counter, counter_family, gauge};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    method: String,
    path: String,
    server_type: String,
    long_running: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CodeLabel {
    code: u16,
}

/// The counters of this process.
#[derive(Debug, Clone)]
pub struct Counters {
    requests: Family<RequestLabels, Counter>,
    refused: Family<CodeLabel, Counter>,
    connections: Counter,
    displaced: Counter,
    reviews: Counter,
    handshakes: Counter,
    /// Upgraded connections open now.
    pub upgrades: Gauge,
    /// Log streams open now.
    pub log_streams: Gauge,
}

impl Default for Counters {
    fn default() -> Self {
        Self {
            requests: counter_family("kubelet_http_requests", "Requests received since the start, by path"),
            refused: counter_family(
                "quintlet_node_api_refused_requests",
                "Requests refused for want of credentials (401) or rights (403), by answer",
            ),
            connections: counter(
                "quintlet_node_api_refused_connections",
                "Connections closed because too many are open",
            ),
            displaced: counter(
                "quintlet_node_api_displaced_connections",
                "Connections without a request that was let in, closed to make place for another",
            ),
            reviews: counter(
                "quintlet_node_api_unreviewed_requests",
                "Requests answered 429 because too many wait for a review of their token",
            ),
            handshakes: counter("quintlet_node_api_failed_handshakes", "TLS handshakes that failed"),
            upgrades: gauge(
                "quintlet_node_api_upgrades",
                "Exec, attach and port-forward connections open now",
            ),
            log_streams: gauge("quintlet_node_api_log_streams", "Log streams open now"),
        }
    }
}

impl Counters {
    /// A request, by the first part of its path; what no route has is one path, or a scanner would fill the registry.
    pub fn request(&self, method: &http::Method, route: &str, is_readonly: bool, is_long: bool) {
        let labels = RequestLabels {
            method: if is_usual(method) { method.to_string() } else { "other".to_owned() },
            path: route.to_owned(),
            server_type: if is_readonly { "readonly" } else { "readwrite" }.to_owned(),
            long_running: is_long.to_string(),
        };
        self.requests.get_or_create(&labels).inc();
    }

    /// A request that was refused.
    pub fn refused(&self, code: http::StatusCode) {
        self.refused.get_or_create(&CodeLabel { code: code.as_u16() }).inc();
    }

    /// How many were refused with `code`.
    #[must_use]
    pub fn refused_so_far(&self, code: http::StatusCode) -> u64 {
        self.refused.get_or_create(&CodeLabel { code: code.as_u16() }).get()
    }

    /// A connection closed for there being too many.
    pub fn refused_connection(&self) {
        self.connections.inc();
    }

    /// A connection of a stranger closed in favour of another.
    pub fn displaced_connection(&self) {
        self.displaced.inc();
    }

    /// A request that nobody has time to find the user of.
    pub fn unreviewed(&self) {
        self.reviews.inc();
    }

    /// A handshake that failed.
    pub fn failed_handshake(&self) {
        self.handshakes.inc();
    }
}

fn is_usual(method: &http::Method) -> bool {
    use http::Method;
    [Method::GET, Method::POST, Method::PUT, Method::PATCH, Method::DELETE, Method::HEAD, Method::OPTIONS]
        .contains(method)
}
