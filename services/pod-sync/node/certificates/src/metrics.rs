//! The kubelet's metrics of its certificates.

use std::fmt;
use std::sync::{Arc, Once, OnceLock};

use jiff::Timestamp;
use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;
use quintlet_kit::clock::Clock;
use quintlet_telemetry::metrics::{gauge, histogram_of, registry};

use crate::decide::CertificatePurpose;

const CLIENT_TTL: &str = "kubelet_certificate_manager_client_ttl_seconds";
const SERVER_TTL: &str = "kubelet_certificate_manager_server_ttl_seconds";

/// Ages of certificates at their rotation, in seconds: a minute to four years.
const AGES: [f64; 10] = [
    60.0,
    3_600.0,
    14_400.0,
    86_400.0,
    604_800.0,
    2_592_000.0,
    7_776_000.0,
    15_552_000.0,
    31_104_000.0,
    124_416_000.0,
];

/// The end of a certificate in use.
type End = Arc<Mutex<Option<(Clock, Option<Timestamp>)>>>;

/// The ends of both certificates, for the scrape. None: the certificate is not managed, and has no series.
#[derive(Debug, Default)]
struct Ends {
    client: End,
    serving: End,
}

fn ends() -> &'static Ends {
    static ENDS: OnceLock<Ends> = OnceLock::new();
    ENDS.get_or_init(Ends::default)
}

/// Computes the time to live at the scrape.
#[derive(Debug)]
struct TimesToLive;

impl Collector for TimesToLive {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let ends = ends();
        for (name, end, help) in [
            (
                CLIENT_TTL,
                &ends.client,
                "Gauge of the TTL (time-to-live) of the Kubelet's client certificate. The value is in seconds until certificate expiry (negative if already expired). If client certificate is invalid or unused, the value will be +INF",
            ),
            (
                SERVER_TTL,
                &ends.serving,
                "Gauge of the shortest TTL (time-to-live) of the Kubelet's serving certificate. The value is in seconds until certificate expiry (negative if already expired). If serving certificate is invalid or unused, the value will be +INF",
            ),
        ] {
            let Some((clock, end)) = end.lock().clone() else { continue };
            let left =
                end.map_or(f64::INFINITY, |end| end.duration_since(clock.wall()).as_secs_f64().trunc());
            ConstGauge::new(left).encode(encoder.encode_descriptor(
                name,
                help,
                None,
                MetricType::Gauge,
            )?)?;
        }
        Ok(())
    }
}

/// The metrics of one certificate.
#[derive(Debug, Clone)]
pub(crate) struct CertificateMetrics {
    end: End,
    /// A gauge, since a kubelet's counter has no suffix.
    failures: Gauge,
    /// Ages at rotation; the kubelet has them for the serving certificate only.
    ages: Option<Histogram>,
}

impl CertificateMetrics {
    /// Registers the metrics. Each is registered once in a process.
    pub(crate) fn register(purpose: CertificatePurpose) -> Self {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| registry().register_collector(Box::new(TimesToLive)));
        const FAILURES: &str = "Counter of certificate renewal errors.";
        match purpose {
            CertificatePurpose::Client => Self {
                end: Arc::clone(&ends().client),
                failures: gauge("kubelet_certificate_manager_client_expiration_renew_errors", FAILURES),
                ages: None,
            },
            CertificatePurpose::Serving => Self {
                end: Arc::clone(&ends().serving),
                failures: gauge("kubelet_server_expiration_renew_errors", FAILURES),
                ages: Some(histogram_of(
                    "kubelet_certificate_manager_server_rotation_seconds",
                    "Histogram of the number of seconds the previous certificate lived before being rotated.",
                    &AGES,
                )),
            },
        }
    }

    /// Records the end of the certificate in use.
    pub(crate) fn set_end(&self, clock: &Clock, end: Option<Timestamp>) {
        *self.end.lock() = Some((clock.clone(), end));
    }

    /// Counts a failed request.
    pub(crate) fn count_failure(&self) {
        self.failures.inc();
    }

    /// Records the age of a certificate that was replaced.
    pub(crate) fn record_age(&self, not_before: Timestamp, now: Timestamp) {
        if let Some(ages) = &self.ages {
            ages.observe(now.duration_since(not_before).as_secs_f64());
        }
    }
}
