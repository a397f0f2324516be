//! Validates lifecycle hooks and probes of containers.

use k8s_openapi::api::core::v1::{
    Container, ExecAction, GRPCAction, HTTPGetAction, Lifecycle, LifecycleHandler, PodSpec, Probe,
    SleepAction, TCPSocketAction,
};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::errors::Errors;
use super::names;

/// Validates the hooks and probes of a container.
pub(super) fn all(c: &Container, spec: &PodSpec, path: &str, errors: &mut Errors) {
    if let Some(hooks) = c.lifecycle.as_ref() {
        lifecycle(hooks, spec, &format!("{path}.lifecycle"), errors);
    }
    for (field, value) in [
        ("livenessProbe", &c.liveness_probe),
        ("readinessProbe", &c.readiness_probe),
        ("startupProbe", &c.startup_probe),
    ] {
        if let Some(value) = value.as_ref() {
            probe(value, field == "readinessProbe", &format!("{path}.{field}"), errors);
        }
    }
}

// validateLifecycle
fn lifecycle(hooks: &Lifecycle, spec: &PodSpec, path: &str, errors: &mut Errors) {
    for (field, hook) in [("postStart", &hooks.post_start), ("preStop", &hooks.pre_stop)] {
        if let Some(hook) = hook.as_ref() {
            let grace = spec.termination_grace_period_seconds;
            handler(Handler::of_hook(hook), grace, &format!("{path}.{field}"), errors);
        }
    }
    let Some(signal) = hooks.stop_signal.as_deref() else { return };
    let path = format_args!("{path}.stopSignal");
    match spec.os.as_ref().map(|os| os.name.as_str()) {
        None | Some("") => {
            errors.forbidden(path, "may not be set for containers with empty `spec.os.name`");
        }
        Some("windows") => errors.word_if_set(path, Some(signal), &["SIGKILL", "SIGTERM"]),
        Some(_) if names::is_signal(signal) => {}
        Some(_) => errors.invalid(path, signal, "must be the name of a signal"),
    }
}

// validateProbe
fn probe(p: &Probe, is_readiness: bool, path: &str, errors: &mut Errors) {
    handler(Handler::of_probe(p), None, path, errors);
    for (field, value) in [
        ("initialDelaySeconds", p.initial_delay_seconds),
        ("timeoutSeconds", p.timeout_seconds),
        ("periodSeconds", p.period_seconds),
        ("successThreshold", p.success_threshold),
        ("failureThreshold", p.failure_threshold),
    ] {
        if let Some(value) = value.filter(|v| *v < 0) {
            errors.invalid(format_args!("{path}.{field}"), value, names::NOT_NEGATIVE);
        }
    }
    if let Some(grace) = p.termination_grace_period_seconds {
        let path = format_args!("{path}.terminationGracePeriodSeconds");
        if grace <= 0 {
            errors.invalid(path, grace, "must be greater than 0");
        }
        if is_readiness {
            errors.invalid(path, grace, "must not be set for readinessProbes");
        }
    }
    if let Some(threshold) = p.success_threshold.filter(|t| *t != 1 && !is_readiness) {
        errors.invalid(format_args!("{path}.successThreshold"), threshold, "must be 1");
    }
}

#[derive(Default)]
struct Handler<'a> {
    exec: Option<&'a ExecAction>,
    http: Option<&'a HTTPGetAction>,
    tcp: Option<&'a TCPSocketAction>,
    grpc: Option<&'a GRPCAction>,
    sleep: Option<&'a SleepAction>,
}

impl<'a> Handler<'a> {
    fn of_probe(p: &'a Probe) -> Self {
        Self {
            exec: p.exec.as_ref(),
            http: p.http_get.as_ref(),
            tcp: p.tcp_socket.as_ref(),
            grpc: p.grpc.as_ref(),
            sleep: None,
        }
    }

    fn of_hook(hook: &'a LifecycleHandler) -> Self {
        Self {
            exec: hook.exec.as_ref(),
            http: hook.http_get.as_ref(),
            tcp: hook.tcp_socket.as_ref(),
            grpc: None,
            sleep: hook.sleep.as_ref(),
        }
    }
}

// validateHandler. If several handlers are set, the first is checked.
fn handler(handler: Handler<'_>, grace: Option<i64>, path: &str, errors: &mut Errors) {
    let set: Vec<&str> = [
        ("exec", handler.exec.is_some()),
        ("httpGet", handler.http.is_some()),
        ("tcpSocket", handler.tcp.is_some()),
        ("grpc", handler.grpc.is_some()),
        ("sleep", handler.sleep.is_some()),
    ]
    .into_iter()
    .filter_map(|(field, is_set)| is_set.then_some(field))
    .collect();
    if set.is_empty() {
        return errors.required(path, "must specify a handler type");
    }
    for field in set.iter().skip(1) {
        errors.forbidden(format_args!("{path}.{field}"), "may not specify more than 1 handler type");
    }
    match (handler.exec, handler.http, handler.tcp, handler.grpc, handler.sleep) {
        (Some(exec), ..) => {
            if exec.command.as_ref().is_none_or(Vec::is_empty) {
                errors.required(format_args!("{path}.exec.command"), "");
            }
        }
        (_, Some(http), ..) => http_get(http, &format!("{path}.httpGet"), errors),
        (_, _, Some(tcp), ..) => port(&tcp.port, &format!("{path}.tcpSocket.port"), errors),
        (_, _, _, Some(grpc), _) => {
            port_number(grpc.port, format_args!("{path}.grpc.port"), errors);
            let modes = ["Plaintext", "TLS"];
            errors.word_if_set(format_args!("{path}.grpc.mode"), grpc.mode.as_deref(), &modes);
        }
        (.., Some(sleep)) => {
            if let Some(grace) = grace
                && !(0..=grace).contains(&sleep.seconds)
            {
                let detail = format_args!(
                    "must be non-negative and less than terminationGracePeriodSeconds ({grace})"
                );
                errors.invalid(format_args!("{path}.sleep"), sleep.seconds, detail);
            }
        }
        (None, None, None, None, None) => {}
    }
}

// validateHTTPGetAction
fn http_get(http: &HTTPGetAction, path: &str, errors: &mut Errors) {
    if http.path.as_deref().unwrap_or_default().is_empty() {
        errors.required(format_args!("{path}.path"), "");
    }
    port(&http.port, &format!("{path}.port"), errors);
    let scheme = http.scheme.as_deref().unwrap_or_default();
    errors.word_if_set(format_args!("{path}.scheme"), Some(scheme), &["HTTP", "HTTPS"]);
    let protocols = ["HTTP1", "HTTP2"];
    errors.word_if_set(format_args!("{path}.protocol"), http.protocol.as_deref(), &protocols);
    if http.protocol.as_deref() == Some("HTTP2") {
        if scheme == "HTTPS" {
            errors.invalid(format_args!("{path}.protocol"), "HTTP2", "must be used with scheme HTTP");
        }
        if http.host.as_ref().is_some_and(|host| !host.is_empty()) {
            errors.forbidden(format_args!("{path}.host"), "may not be set when protocol is HTTP2");
        }
    }
    for header in http.http_headers.iter().flatten() {
        errors.format(format_args!("{path}.httpHeaders"), &header.name, names::http_header(&header.name));
    }
}

// ValidatePortNumOrName
fn port(port: &IntOrString, path: &str, errors: &mut Errors) {
    match port {
        IntOrString::Int(number) => port_number(*number, path, errors),
        IntOrString::String(name) => errors.format(path, name, names::port_name(name)),
    }
}

pub(super) fn port_number(port: i32, path: impl std::fmt::Display, errors: &mut Errors) {
    if !(1..=65_535).contains(&port) {
        errors.invalid(path, port, names::PORT);
    }
}
