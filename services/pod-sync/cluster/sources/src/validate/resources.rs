//! Quantities, requests and limits.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, ResourceFieldSelector, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;
use pod_sync_decisions::qos;
use quintlet_model::quantity::Quantity;

use super::errors::Errors;
use super::names;

const HUGE_PAGES: &str = "hugepages-";
const NO_QUANTITY: &str =
    "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'";
const STANDARD: [&str; 3] = ["cpu", "ephemeral-storage", "memory"];
const RESOURCE_FIELDS: [&str; 6] = [
    "limits.cpu",
    "limits.ephemeral-storage",
    "limits.memory",
    "requests.cpu",
    "requests.ephemeral-storage",
    "requests.memory",
];
const BYTE_DIVISORS: [&str; 13] =
    ["1", "1k", "1M", "1G", "1T", "1P", "1E", "1Ki", "1Mi", "1Gi", "1Ti", "1Pi", "1Ei"];

/// The kind of object whose resources are validated.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ResourceOwner {
    Pod,
    Container,
}

/// Parses a quantity, or adds an error.
pub(super) fn parse(quantity: &ApiQuantity, path: &str, errors: &mut Errors) -> Option<Quantity> {
    let parsed = Quantity::parse(quantity.0.trim()).ok();
    if parsed.is_none() {
        errors.invalid(path, quantity.0.as_str(), NO_QUANTITY);
    }
    parsed
}

pub(super) fn is_negative(quantity: Quantity) -> bool {
    quantity < Quantity::default()
}

/// Validates names and amounts of a list. Returns the amounts.
pub(super) fn list<'a>(
    path: &str,
    list: Option<&'a BTreeMap<String, ApiQuantity>>,
    owner: ResourceOwner,
    errors: &mut Errors,
) -> BTreeMap<&'a str, Quantity> {
    let mut amounts = BTreeMap::new();
    for (name, quantity) in list.into_iter().flatten() {
        let path = format!("{path}[{name}]");
        match owner {
            ResourceOwner::Pod => name_of_pod(name, &path, errors),
            ResourceOwner::Container => name_of_container(name, &path, errors),
        }
        let Some(amount) = parse(quantity, &path, errors) else { continue };
        amounts.insert(name.as_str(), amount);
        if is_negative(amount) {
            errors.invalid(&path, quantity.0.as_str(), names::NOT_NEGATIVE);
        }
        let is_whole = amount == Quantity::from_units(amount.value(), Default::default());
        if is_extended(name) && !is_whole {
            errors.invalid(&path, quantity.0.as_str(), "must be an integer");
        }
        if let Some(size) = name.strip_prefix(HUGE_PAGES) {
            let page = Quantity::parse(size).map(Quantity::value).unwrap_or_default();
            if page <= 0 || amount.value().checked_rem(page) != Some(0) {
                let detail = format_args!("{} is not positive integer multiple of {name}", quantity.0);
                errors.invalid(&path, quantity.0.as_str(), detail);
            }
        }
    }
    amounts
}

fn is_native(name: &str) -> bool {
    !name.contains('/') || name.contains("kubernetes.io/")
}

fn is_extended(name: &str) -> bool {
    !is_native(name)
        && !name.starts_with("requests.")
        && names::qualified(&format!("requests.{name}")).is_empty()
}

// validateContainerResourceName
fn name_of_container(name: &str, path: &str, errors: &mut Errors) {
    let broken = names::qualified(name);
    if !broken.is_empty() {
        return errors.format(path, name, broken);
    }
    if !name.contains('/') {
        if !STANDARD.contains(&name) && !name.starts_with(HUGE_PAGES) {
            errors.invalid(path, name, "must be a standard resource for containers");
        }
    } else if !is_native(name) && !is_extended(name) {
        errors.invalid(path, name, "doesn't follow extended resource name standard");
    }
}

// validatePodResourceName
fn name_of_pod(name: &str, path: &str, errors: &mut Errors) {
    let broken = names::qualified(name);
    if !broken.is_empty() {
        return errors.format(path, name, broken);
    }
    if !["cpu", "memory"].contains(&name) && !name.starts_with(HUGE_PAGES) {
        errors.unsupported(path, name, &["cpu", "hugepages-", "memory"]);
    }
}

// validateResourceRequirements
fn requirements(r: &ResourceRequirements, owner: ResourceOwner, path: &str, errors: &mut Errors) {
    let limits = list(&format!("{path}.limits"), r.limits.as_ref(), owner, errors);
    let requests = list(&format!("{path}.requests"), r.requests.as_ref(), owner, errors);
    for (name, request) in &requests {
        let may_exceed = is_native(name) && !name.starts_with(HUGE_PAGES);
        let Some(limit) = limits.get(name) else {
            let has_limit = r.limits.as_ref().is_some_and(|l| l.contains_key(*name));
            if !may_exceed && !has_limit {
                let detail = "Limit must be set for non overcommitable resources";
                errors.required(format_args!("{path}.limits"), detail);
            }
            continue;
        };
        let shown = request.to_string();
        if !may_exceed && request != limit {
            let detail = format_args!("must be equal to {name} limit of {limit}");
            errors.invalid(format_args!("{path}.requests"), shown.as_str(), detail);
        } else if request > limit {
            let detail = format_args!("must be less than or equal to {name} limit of {limit}");
            errors.invalid(format_args!("{path}.requests"), shown.as_str(), detail);
        }
    }
    let has = |is: fn(&str) -> bool| limits.keys().chain(requests.keys()).any(|name| is(name));
    if has(|name| name.starts_with(HUGE_PAGES)) && !has(|name| ["cpu", "memory"].contains(&name)) {
        errors.forbidden(path, "HugePages require cpu or memory");
    }
}

/// `ValidateContainerResourceRequirements`
pub(super) fn of_container(c: &Container, pod_claims: &BTreeSet<&str>, path: &str, errors: &mut Errors) {
    let Some(r) = c.resources.as_ref() else { return };
    requirements(r, ResourceOwner::Container, path, errors);
    // A claim is listed once as a whole, or once for each of its requests.
    let (mut whole, mut in_part) = (BTreeSet::new(), BTreeSet::new());
    let mut keys = BTreeSet::new();
    for (i, claim) in r.claims.iter().flatten().enumerate() {
        let path = format!("{path}.claims[{i}]");
        let name = claim.name.as_str();
        if name.is_empty() {
            errors.required(&path, "");
            continue;
        }
        let request = claim.request.as_deref().unwrap_or_default();
        if whole.contains(name) {
            errors.duplicate(&path, name);
        } else if request.is_empty() {
            if in_part.contains(name) {
                errors.duplicate(&path, name);
            }
            whole.insert(name);
        } else {
            errors.format(format_args!("{path}.request"), request, names::dns_label(request));
            in_part.insert(name);
            if !keys.insert((name, request)) {
                errors.duplicate(&path, format!("{name}/{request}").as_str());
            }
        }
        if !pod_claims.contains(name) {
            let detail = if pod_claims.is_empty() {
                "must be one of the names in pod.spec.resourceClaims which is empty"
            } else {
                "must be one of the names in pod.spec.resourceClaims"
            };
            errors.not_found(&path, name, detail);
        }
    }
}

/// `validatePodResources`
pub(super) fn of_pod(pod: &Pod, spec: &PodSpec, errors: &mut Errors) {
    let Some(own) = spec.resources.as_ref() else { return };
    let path = "spec.resources";
    if own.claims.is_some() {
        errors.forbidden(format_args!("{path}.claims"), "claims cannot be set for Resources at pod-level");
    }
    requirements(own, ResourceOwner::Pod, path, errors);
    let amount = |list: Option<&BTreeMap<String, ApiQuantity>>, name: &str| {
        list.and_then(|l| l.get(name)).map(Quantity::of)
    };
    let mut of_containers = pod.clone();
    if let Some(spec) = of_containers.spec.as_mut() {
        spec.resources = None;
    }
    for (name, together) in qos::pod_requests_without_overhead(&of_containers) {
        let own = amount(own.requests.as_ref(), &name).unwrap_or_default();
        if together > own {
            let detail =
                format_args!("must be greater than or equal to aggregate container requests of {together}");
            errors.invalid(format_args!("{path}.requests[{name}]"), own.to_string().as_str(), detail);
        }
    }
    for (i, container) in spec.containers.iter().enumerate() {
        for (name, limit) in container.resources.iter().flat_map(|r| r.limits.iter().flatten()) {
            let limit = Quantity::of(limit);
            let Some(most) = amount(own.limits.as_ref(), name).filter(|most| limit > *most) else { continue };
            let detail = format_args!("must be less than or equal to pod limits of {most}");
            let path = format_args!("{path}.containers[{i}][{name}].limits");
            errors.invalid(path, limit.to_string().as_str(), detail);
        }
    }
}

/// `validateContainerResourceFieldSelector`
pub(super) fn field_ref(field: &ResourceFieldSelector, is_file: bool, path: &str, errors: &mut Errors) {
    let resource = field.resource.as_str();
    let huge = ["requests.hugepages-", "limits.hugepages-"].iter().any(|p| resource.starts_with(p));
    if is_file && field.container_name.as_deref().unwrap_or_default().is_empty() {
        errors.required(format_args!("{path}.containerName"), "");
    } else if resource.is_empty() {
        errors.required(format_args!("{path}.resource"), "");
    } else if !huge {
        errors.word_if_set(format_args!("{path}.resource"), Some(resource), &RESOURCE_FIELDS);
    }
    let path = format!("{path}.divisor");
    let Some(divisor) = field.divisor.as_ref().and_then(|d| parse(d, &path, errors)) else { return };
    if divisor.is_zero() {
        return;
    }
    let is_one_of = |units: &[&str]| units.iter().any(|u| Quantity::parse(u) == Ok(divisor));
    let what = match resource.split_once('.').map(|(_, name)| name) {
        Some("cpu") if !is_one_of(&["1m", "1"]) => {
            let detail = "only divisor's values 1m and 1 are supported with the cpu resource";
            return errors.invalid(path, resource, detail);
        }
        Some("memory") => "memory",
        Some("ephemeral-storage") => "local ephemeral storage",
        _ if huge => "hugepages",
        _ => return,
    };
    if !is_one_of(&BYTE_DIVISORS) {
        let units = BYTE_DIVISORS.join(", ");
        let detail = format_args!("only divisor's values {units} are supported with the {what} resource");
        errors.invalid(path, resource, detail);
    }
}
