//! Rules between fields (`pkg/kubelet/apis/config/validation: ValidateKubeletConfiguration`). Each field was
//! checked by itself before.

mod resources;
mod sysctls;
mod view;

use std::collections::BTreeMap;
use std::net::SocketAddr;

use quintlet_model::go_duration;

use self::view::View;
use crate::config::Config;
use crate::diagnostics::Diagnostic;
use crate::node::{Data, LocatedValue, Origin};
use crate::table::{Document, FieldSupport, Row, Service, TRUST_BUNDLE_PROJECTION, TRUST_BUNDLES};

/// Reports violations of the rules.
pub(crate) fn check(config: &Config, service: Option<Service>, out: &mut Vec<Diagnostic>) {
    let view = View { config, service };
    for rule in [refused, images, shutdown, pulls, logs, server, tls, subscribers, other] {
        rule(&view, out);
    }
    resources::check(&view, out);
    sysctls::check(&view, out);
}

fn refused(view: &View<'_>, out: &mut Vec<Diagnostic>) {
    let refused = |row: &&Row| matches!(row.support, FieldSupport::Refused { .. });
    for row in Document::Kubelet.rows().iter().filter(refused) {
        let FieldSupport::Refused { why } = row.support else { continue };
        let Some(value) = view.node(row.field) else { continue };
        if row.default_node().is_none_or(|default| !default.equals(value)) {
            out.push(Diagnostic::error(value.origin.clone(), row.field, format!("{}: {why}", value.data)));
        }
    }
}

fn images(view: &View<'_>, out: &mut Vec<Diagnostic>) {
    const HIGH: &str = "imageGCHighThresholdPercent";
    const LOW: &str = "imageGCLowThresholdPercent";
    if let (Some(high), Some(low)) = (view.int(HIGH), view.int(LOW))
        && high <= low
    {
        let how = if high < low { "is below" } else { "is not above" };
        let on_low = view.node(HIGH).is_none_or(|n| !n.origin.is_set());
        out.push(if on_low && view.node(LOW).is_some_and(|n| n.origin.is_set()) {
            view.blame(&[LOW], format!("{low} is not below {HIGH} {high}"))
        } else {
            view.blame(&[HIGH], format!("{high} {how} {LOW} {low}"))
        });
    }
    let (min, max) = (view.nanos("imageMinimumGCAge"), view.nanos("imageMaximumGCAge"));
    if max != 0 && max < min {
        let fields = ["imageMaximumGCAge", "imageMinimumGCAge"];
        let [max, min] = [max, min].map(go_duration::format_short);
        out.push(view.blame(&fields, format!("a maximum of {max} is below the minimum of {min}")));
    }
}

fn shutdown(view: &View<'_>, out: &mut Vec<Diagnostic>) {
    const ALL: &str = "shutdownGracePeriod";
    const CRITICAL: &str = "shutdownGracePeriodCriticalPods";
    const BY_PRIORITY: &str = "shutdownGracePeriodByPodPriority";
    let (all, critical) = (view.nanos(ALL), view.nanos(CRITICAL));
    if critical > all {
        let [critical, all] = [critical, all].map(go_duration::format_short);
        out.push(view.blame(&[CRITICAL], format!("{critical} is above {ALL} {all}")));
    }
    for (field, nanos) in [(ALL, all), (CRITICAL, critical)] {
        if nanos != 0 && nanos < 1_000_000_000 {
            out.push(view.blame(&[field], format!("{} is below 1s", go_duration::format_short(nanos))));
        }
    }
    let by_priority = view.node(BY_PRIORITY).map(LocatedValue::elements).unwrap_or_default();
    if !by_priority.is_empty() && (all != 0 || critical != 0) {
        out.push(view.blame(&[BY_PRIORITY], format!("excludes {ALL} and {CRITICAL}")));
    }
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    for (at, priority) in by_priority.iter().enumerate() {
        let Some(number) = priority.get("priority") else { continue };
        if let Some(first) = seen.insert(number.data.to_string(), at) {
            let path = format!("{BY_PRIORITY}[{at}].priority");
            let message = format!("{} is already the priority of [{first}]", number.data);
            out.push(Diagnostic::error(number.origin.clone(), path, message));
        }
    }
}

fn pulls(view: &View<'_>, out: &mut Vec<Diagnostic>) {
    if view.is("serializeImagePulls")
        && let Some(many) = view.int("maxParallelImagePulls")
        && many > 1
    {
        let fields = ["maxParallelImagePulls", "serializeImagePulls"];
        out.push(view.blame(&fields, format!("{many} pulls at once, but serializeImagePulls is true")));
    }
}

fn logs(view: &View<'_>, out: &mut Vec<Diagnostic>) {
    if view.is("enableSystemLogQuery") && !view.is("enableSystemLogHandler") {
        out.push(view.blame(&["enableSystemLogQuery"], "true: needs enableSystemLogHandler".to_owned()));
    }
}

fn server(view: &View<'_>, out: &mut Vec<Diagnostic>) {
    let (cert, key) = ("tlsCertFile", "tlsPrivateKeyFile");
    for (one, other) in [(cert, key), (key, cert)] {
        if !view.text(one).is_empty() && view.text(other).is_empty() {
            out.push(view.blame(&[one], format!("needs {other}")));
        }
    }
    let (port, read_only) = (view.int("port"), view.int("readOnlyPort"));
    if read_only.is_some_and(|p| p != 0) && port == read_only {
        out.push(view.blame(&["readOnlyPort"], "is the same as port".to_owned()));
    }
}

/// Checks cipher suites and curves. Those that this server does not support are skipped with a warning. An
/// unknown name, and a list without a supported entry, are errors.
fn tls(view: &View<'_>, out: &mut Vec<Diagnostic>) {
    use crate::tls::{SUITES, Support, group, suite};
    let suite = |n: &LocatedValue| n.text().map_or(Support::Unknown, suite);
    let group = |n: &LocatedValue| match n.data {
        Data::Int(number) => u16::try_from(number).map_or(Support::Unknown, group),
        _ => Support::Unknown,
    };
    let mut check_names = |field: &str, supported: &str, support: &dyn Fn(&LocatedValue) -> Support| {
        let elements = view.node(field).map(LocatedValue::elements).unwrap_or_default();
        let mut is_left = elements.is_empty();
        for (at, element) in elements.iter().enumerate() {
            let (origin, path) = (element.origin.clone(), format!("{field}[{at}]"));
            match support(element) {
                Support::Supported(_) | Support::Always => is_left = true,
                Support::Unsupported(why) => {
                    out.push(Diagnostic::warning(origin, path, format!("{}: {why}", element.data)));
                }
                Support::Unknown => {
                    is_left = true;
                    out.push(Diagnostic::error(
                        origin,
                        path,
                        format!("{}: unknown; supported: {supported}", element.data),
                    ));
                }
            }
        }
        if !is_left {
            out.push(view.blame(&[field], format!("no element is supported; supported: {supported}")));
        }
    };
    check_names("tlsCipherSuites", &SUITES.join(", "), &suite);
    check_names("tlsCurvePreferences", "29 (X25519), 23 (P-256), 24 (P-384)", &group);
}

/// Subscribers over TCP have mutual TLS and names, or there are none.
fn subscribers(view: &View<'_>, out: &mut Vec<Diagnostic>) {
    const LISTEN: &str = "subscribers.tls.listen";
    const NEEDED: [&str; 4] = [
        "subscribers.tls.certFile",
        "subscribers.tls.keyFile",
        "subscribers.tls.clientCAFile",
        "subscribers.tls.names",
    ];
    let node = |field: &str| view.config.value(Document::Quintlet, field);
    let is_set = |field: &str| {
        node(field).is_some_and(|value| {
            !value.elements().is_empty() || value.text().is_some_and(|text| !text.is_empty())
        })
    };
    let blame = |field: &str, message: String| {
        let origin = node(field).map_or(Origin::Default, |value| value.origin.clone());
        Diagnostic::error(origin, field, message)
    };
    if !is_set(LISTEN) {
        let without = NEEDED.iter().filter(|field| is_set(field));
        out.extend(without.map(|field| blame(field, format!("needs {LISTEN}"))));
        return;
    }
    // The services that only admit node-api have no flags for the rest.
    let has_flags = view.service.is_none_or(|service| service == Service::NodeApi);
    let is_flag = node(LISTEN).is_some_and(|value| matches!(value.origin, Origin::Flag(_)));
    let missing = NEEDED.iter().filter(|field| (has_flags || !is_flag) && !is_set(field));
    out.extend(missing.map(|field| blame(LISTEN, format!("needs {field}"))));
    let names = node("subscribers.tls.names").map(LocatedValue::elements).unwrap_or_default();
    for (at, name) in names.iter().enumerate().filter(|(_, name)| name.text().is_none_or(str::is_empty)) {
        let path = format!("subscribers.tls.names[{at}]");
        out.push(Diagnostic::error(name.origin.clone(), path, "is empty".to_owned()));
    }
    let address = node(LISTEN).and_then(LocatedValue::text).and_then(|text| text.parse::<SocketAddr>().ok());
    for field in ["port", "readOnlyPort", "healthzPort"] {
        let port = view.int(field).filter(|port| *port != 0);
        if port.is_some() && port == address.map(|address| i64::from(address.port())) {
            out.push(blame(LISTEN, format!("has the port of {field}")));
        }
    }
}

fn other(view: &View<'_>, out: &mut Vec<Diagnostic>) {
    if view.gate(TRUST_BUNDLE_PROJECTION) && !view.gate(TRUST_BUNDLES) {
        // The kubelet does not start either.
        let message = format!("{TRUST_BUNDLE_PROJECTION}: true: needs {TRUST_BUNDLES}: true");
        out.push(view.blame(&["featureGates"], message));
    }
    if let Some(ids) = view.int("userNamespaces.idsPerPod")
        && ids % 65536 != 0
    {
        out.push(view.blame(&["userNamespaces.idsPerPod"], format!("{ids} is no multiple of 65536")));
    }
    let mut seen: Vec<(&str, &str)> = Vec::new();
    let taints = view.node("registerWithTaints").map(LocatedValue::elements).unwrap_or_default();
    for (at, taint) in taints.iter().enumerate() {
        let field = |name: &str| taint.get(name).and_then(LocatedValue::text).unwrap_or_default();
        let id = (field("key"), field("effect"));
        if seen.contains(&id) {
            let path = format!("registerWithTaints[{at}]");
            let message = format!("duplicate taint {} with effect {}", id.0, id.1);
            out.push(Diagnostic::error(taint.origin.clone(), path, message));
        }
        seen.push(id);
    }
    labels(view, out);
}

/// Labels that the API server would not take, or not from a node.
fn labels(view: &View<'_>, out: &mut Vec<Diagnostic>) {
    let labels =
        view.config.value(Document::Quintlet, "nodeLabels").map(LocatedValue::entries).unwrap_or_default();
    for entry in labels {
        if let Some(why) = crate::labels::problem(&entry.key, entry.value.text().unwrap_or_default()) {
            out.push(Diagnostic::error(entry.origin.clone(), format!("nodeLabels.{}", entry.key), why));
        }
    }
}
