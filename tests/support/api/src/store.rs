//! Objects, their versions and the bounded history that watches read.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use jiff::Timestamp;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::admit;
use crate::error::ApiError;
use crate::resources::{RESOURCES, Resource};

/// Type of a watch event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChangeKind {
    Added,
    Modified,
    Deleted,
}

/// One change to one object.
#[derive(Debug, Clone)]
pub(crate) struct Change {
    pub(crate) rv: u64,
    pub(crate) kind: ChangeKind,
    pub(crate) object: Arc<Value>,
    pub(crate) before: Option<Arc<Value>>,
}

type Key = (String, String);

#[derive(Default)]
struct Table {
    objects: BTreeMap<Key, Arc<Value>>,
    log: VecDeque<Change>,
    /// Changes up to this version have been dropped.
    floor: u64,
}

#[derive(Default)]
struct Data {
    rv: u64,
    tables: HashMap<&'static str, Table>,
    services: u32,
}

/// One page of a list.
pub(crate) struct Page {
    pub(crate) items: Vec<Arc<Value>>,
    pub(crate) rv: u64,
    /// Key after which the next page starts, and the number of remaining objects.
    pub(crate) more: Option<(Key, usize)>,
}

/// Options of a delete request.
#[derive(Debug, Default, Clone)]
pub(crate) struct DeleteOptions {
    pub(crate) grace: Option<i64>,
    pub(crate) uid: Option<String>,
    pub(crate) resource_version: Option<String>,
}

pub(crate) struct Store {
    data: Mutex<Data>,
    history: usize,
    changed: watch::Sender<u64>,
    /// Bytes of JSON that an update may leave of an object.
    object_limit: AtomicUsize,
}

impl Store {
    /// `history`: changes kept per resource.
    pub(crate) fn new(history: usize) -> Self {
        let data = Data {
            // A real server never shows a version near zero.
            rv: 100,
            tables: RESOURCES.iter().map(|r| (r.plural, Table { floor: 100, ..Table::default() })).collect(),
            services: 0,
        };
        let object_limit = AtomicUsize::new(usize::MAX);
        Self { data: Mutex::new(data), history, changed: watch::channel(100).0, object_limit }
    }

    /// Sets the largest object that an update may leave, in bytes of JSON. etcd has a limit of 1.5 MiB for
    /// the binary form of an object.
    pub(crate) fn limit_objects(&self, bytes: usize) {
        self.object_limit.store(bytes, Ordering::Relaxed);
    }

    fn is_too_large(&self, object: &Value) -> bool {
        let limit = self.object_limit.load(Ordering::Relaxed);
        limit < usize::MAX && object.to_string().len() > limit
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    pub(crate) fn get(
        &self,
        resource: &Resource,
        namespace: &str,
        name: &str,
    ) -> Result<Arc<Value>, ApiError> {
        let data = self.data.lock();
        data.find(resource, namespace, name).ok_or_else(|| ApiError::not_found(resource, name))
    }

    pub(crate) fn list(
        &self,
        resource: &Resource,
        namespace: &str,
        matches: impl Fn(&Value) -> bool,
        after: Option<&Key>,
        limit: usize,
    ) -> Page {
        let data = self.data.lock();
        let table = &data.tables[resource.plural];
        let mut found = table
            .objects
            .iter()
            .filter(|((ns, _), _)| namespace.is_empty() || ns == namespace)
            .filter(|(key, object)| after.is_none_or(|after| *key > after) && matches(object));
        let (mut items, mut last) = (Vec::new(), None);
        for (key, object) in found.by_ref().take(limit) {
            items.push(object.clone());
            last = Some(key.clone());
        }
        let left = found.count();
        Page { items, rv: data.rv, more: last.filter(|_| left > 0).map(|key| (key, left)) }
    }

    /// Returns the changes after a version, and the newest version.
    pub(crate) fn changes_after(&self, resource: &Resource, rv: u64) -> Result<(Vec<Change>, u64), ApiError> {
        let data = self.data.lock();
        let table = &data.tables[resource.plural];
        if rv < table.floor {
            return Err(ApiError::expired(rv, table.floor));
        }
        let first = table.log.partition_point(|change| change.rv <= rv);
        Ok((table.log.range(first..).cloned().collect(), data.rv))
    }

    /// Drops all history: every version so far is expired.
    pub(crate) fn compact(&self) {
        let mut data = self.data.lock();
        data.rv += 1;
        let rv = data.rv;
        for table in data.tables.values_mut() {
            table.log.clear();
            table.floor = rv;
        }
        self.changed.send_replace(rv);
    }

    pub(crate) fn create(
        &self,
        resource: &'static Resource,
        namespace: &str,
        mut object: Value,
    ) -> Result<Arc<Value>, ApiError> {
        let mut data = self.data.lock();
        prepare_meta(resource, namespace, &mut object)?;
        let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        if resource.namespaced {
            let namespaces = Resource::by_plural("namespaces").unwrap_or(resource);
            data.find(namespaces, "", namespace).ok_or_else(|| ApiError::not_found(namespaces, namespace))?;
        }
        let key = key(resource, namespace, &name);
        if data.tables[resource.plural].objects.contains_key(&key) {
            return Err(ApiError::already_exists(resource, &name));
        }
        if resource.plural == "pods" {
            admit::default_pod(&mut object);
            let accounts = Resource::by_plural("serviceaccounts").unwrap_or(resource);
            admit::admit_pod(resource, &mut object, |account| {
                data.find(accounts, namespace, account).map(|a| a.as_ref().clone())
            })?;
            admit::default_pod(&mut object);
            admit::validate_pod(resource, &object)?;
            object["metadata"]["generation"] = json!(1);
            object["status"] = json!({"phase": "Pending", "qosClass": admit::qos(&object["spec"])});
        } else {
            let services = &mut data.services;
            admit::default_other(resource, &mut object, || {
                *services += 1;
                format!("10.96.{}.{}", *services / 250, *services % 250 + 1)
            });
            if resource.plural == "nodes" {
                admit::validate_node(resource, &object)?;
            }
        }
        Ok(self.commit(&mut data, resource, key, ChangeKind::Added, object))
    }

    /// Adds an object as it was, with its UID, its times and its status, like a database that is restored.
    pub(crate) fn restore(&self, resource: &'static Resource, namespace: &str, object: Value) -> Arc<Value> {
        let key = key(resource, namespace, text(&object["metadata"]["name"]));
        self.commit(&mut self.data.lock(), resource, key, ChangeKind::Added, object)
    }

    /// Reads, changes and writes an object. `change` edits a copy of the live object.
    pub(crate) fn update(
        &self,
        resource: &'static Resource,
        namespace: &str,
        name: &str,
        subresource: &str,
        change: impl FnOnce(&mut Value) -> Result<(), ApiError>,
    ) -> Result<Arc<Value>, ApiError> {
        let mut data = self.data.lock();
        let old = data.find(resource, namespace, name).ok_or_else(|| ApiError::not_found(resource, name))?;
        let mut new = old.as_ref().clone();
        change(&mut new)?;
        admit::drop_nulls(&mut new);
        check_meta(resource, name, &old, &mut new)?;
        if resource.has_status {
            if subresource == "status" {
                keep(&mut new, &old, "spec");
            } else {
                keep(&mut new, &old, "status");
            }
        }
        if resource.plural == "pods" {
            if subresource == "status" {
                new["metadata"]["ownerReferences"] = old["metadata"]["ownerReferences"].clone();
                admit::align_ips(&mut new["status"]);
                admit::validate_pod_status(resource, &old, &new)?;
            } else {
                admit::default_pod(&mut new);
                admit::validate_pod_update(resource, subresource, &old, &new)?;
                if new["spec"] != old["spec"] {
                    let generation = old["metadata"]["generation"].as_i64().unwrap_or(0);
                    new["metadata"]["generation"] = json!(generation + 1);
                }
            }
            admit::drop_nulls(&mut new);
        } else if resource.plural == "secrets" {
            admit::default_other(resource, &mut new, String::new);
        } else if resource.plural == "nodes" {
            admit::validate_node(resource, &new)?;
        }
        if new == *old {
            // A write without a change creates no new version.
            return Ok(old);
        }
        if self.is_too_large(&new) {
            // The answer has no reason.
            return Err(ApiError::new(500, "", "etcdserver: request is too large"));
        }
        let key = key(resource, namespace, name);
        let stored = self.commit(&mut data, resource, key.clone(), ChangeKind::Modified, new);
        if is_finished(&stored) {
            return Ok(self.remove(&mut data, resource, &key).unwrap_or(stored));
        }
        Ok(stored)
    }

    /// Deletes at once, or starts the grace period. The second value is whether the object was removed.
    pub(crate) fn delete(
        &self,
        resource: &'static Resource,
        namespace: &str,
        name: &str,
        options: &DeleteOptions,
    ) -> Result<(Arc<Value>, bool), ApiError> {
        let mut data = self.data.lock();
        let old = data.find(resource, namespace, name).ok_or_else(|| ApiError::not_found(resource, name))?;
        check_preconditions(resource, name, &old, options)?;
        let key = key(resource, namespace, name);
        let mut new = old.as_ref().clone();
        let finalizers = new["metadata"]["finalizers"].as_array().is_some_and(|f| !f.is_empty());
        let grace = if resource.plural == "pods" { pod_grace(&old, options.grace) } else { Grace::Now };
        let period = match grace {
            Grace::Pending => return Ok((old, false)),
            Grace::Now if !finalizers && resource.plural != "pods" => {
                let removed = self.remove(&mut data, resource, &key).unwrap_or(old);
                return Ok((removed, true));
            }
            Grace::Now => 0,
            Grace::Period(seconds) => seconds,
        };
        mark_deleted(&mut new, period);
        let marked = if new == *old {
            old
        } else {
            self.commit(&mut data, resource, key.clone(), ChangeKind::Modified, new)
        };
        if is_finished(&marked) {
            let removed = self.remove(&mut data, resource, &key).unwrap_or(marked);
            return Ok((removed, true));
        }
        Ok((marked, false))
    }

    fn commit(
        &self,
        data: &mut Data,
        resource: &'static Resource,
        key: Key,
        kind: ChangeKind,
        mut object: Value,
    ) -> Arc<Value> {
        data.rv += 1;
        object["metadata"]["resourceVersion"] = json!(data.rv.to_string());
        let object = Arc::new(object);
        let table = data.tables.entry(resource.plural).or_default();
        let before = table.objects.insert(key, object.clone());
        table.push(Change { rv: data.rv, kind, object: object.clone(), before }, self.history);
        self.changed.send_replace(data.rv);
        object
    }

    fn remove(&self, data: &mut Data, resource: &'static Resource, key: &Key) -> Option<Arc<Value>> {
        let table = data.tables.get_mut(resource.plural)?;
        let before = table.objects.remove(key)?;
        data.rv += 1;
        let mut last = before.as_ref().clone();
        last["metadata"]["resourceVersion"] = json!(data.rv.to_string());
        let object = Arc::new(last);
        let change =
            Change { rv: data.rv, kind: ChangeKind::Deleted, object: object.clone(), before: Some(before) };
        table.push(change, self.history);
        self.changed.send_replace(data.rv);
        Some(object)
    }
}

impl Table {
    fn push(&mut self, change: Change, history: usize) {
        self.log.push_back(change);
        while self.log.len() > history {
            if let Some(forgotten) = self.log.pop_front() {
                self.floor = forgotten.rv;
            }
        }
    }
}

impl Data {
    fn find(&self, resource: &Resource, namespace: &str, name: &str) -> Option<Arc<Value>> {
        self.tables.get(resource.plural)?.objects.get(&key(resource, namespace, name)).cloned()
    }
}

fn key(resource: &Resource, namespace: &str, name: &str) -> Key {
    (if resource.namespaced { namespace.to_owned() } else { String::new() }, name.to_owned())
}

pub(crate) fn now() -> String {
    Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

fn prepare_meta(resource: &Resource, namespace: &str, object: &mut Value) -> Result<(), ApiError> {
    if !object.is_object() {
        return Err(ApiError::bad_request(
            "the object provided is unrecognized (must be of type JSON object)",
        ));
    }
    admit::drop_nulls(object);
    let kind = object["kind"].as_str().unwrap_or_default();
    if !kind.is_empty() && kind != resource.kind {
        let message = format!(
            "{kind} in version {:?} cannot be handled as a {}",
            resource.api_version(),
            resource.kind
        );
        return Err(ApiError::bad_request(message));
    }
    object["kind"] = json!(resource.kind);
    object["apiVersion"] = json!(resource.api_version());
    if object["metadata"].is_null() {
        object["metadata"] = admit::empty();
    }
    let meta = &mut object["metadata"];
    if meta["resourceVersion"].as_str().is_some_and(|rv| !rv.is_empty()) {
        return Err(ApiError::bad_request("resourceVersion should not be set on objects to be created"));
    }
    if resource.namespaced {
        match meta["namespace"].as_str().unwrap_or_default() {
            "" => meta["namespace"] = json!(namespace),
            other if other == namespace => {}
            _ => {
                return Err(ApiError::bad_request(
                    "the namespace of the provided object does not match the namespace sent on the request",
                ));
            }
        }
    }
    if meta["name"].as_str().unwrap_or_default().is_empty()
        && let Some(prefix) = meta["generateName"].as_str()
    {
        meta["name"] = json!(format!("{prefix}{}", admit::suffix()));
    }
    meta["uid"] = json!(uuid::Uuid::new_v4().to_string());
    meta["creationTimestamp"] = json!(now());
    if let Some(meta) = meta.as_object_mut() {
        for field in ["deletionTimestamp", "deletionGracePeriodSeconds", "managedFields", "selfLink"] {
            meta.remove(field);
        }
    }
    admit::validate_name(resource, object)
}

/// Checks the version and immutable fields, and keeps fields that the server owns.
fn check_meta(resource: &Resource, name: &str, old: &Value, new: &mut Value) -> Result<(), ApiError> {
    if !new.is_object() || !new["metadata"].is_object() {
        return Err(ApiError::bad_request("the object has no metadata"));
    }
    let meta = &mut new["metadata"];
    if meta["name"].as_str().is_some_and(|n| n != name) {
        return Err(ApiError::bad_request("the name of the object does not match the name on the URL"));
    }
    let old_meta = &old["metadata"];
    if let Some(uid) = meta["uid"].as_str().filter(|uid| !uid.is_empty())
        && old_meta["uid"] != json!(uid)
    {
        let why = format!(
            "Precondition failed: UID in precondition: {uid}, UID in object meta: {}",
            text(&old_meta["uid"])
        );
        return Err(ApiError::conflict(resource, name, &why));
    }
    if let Some(rv) = meta["resourceVersion"].as_str().filter(|rv| !rv.is_empty() && *rv != "0")
        && old_meta["resourceVersion"] != json!(rv)
    {
        return Err(ApiError::modified(resource, name));
    }
    for field in [
        "name",
        "namespace",
        "uid",
        "creationTimestamp",
        "generation",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "resourceVersion",
    ] {
        keep(meta, old_meta, field);
    }
    new["kind"] = old["kind"].clone();
    new["apiVersion"] = old["apiVersion"].clone();
    Ok(())
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn keep(new: &mut Value, old: &Value, field: &str) {
    match old.get(field) {
        Some(value) => new[field] = value.clone(),
        None => {
            if let Some(new) = new.as_object_mut() {
                new.remove(field);
            }
        }
    }
}

fn check_preconditions(
    resource: &Resource,
    name: &str,
    old: &Value,
    options: &DeleteOptions,
) -> Result<(), ApiError> {
    let meta = &old["metadata"];
    if let Some(uid) = options.uid.as_deref().filter(|uid| *uid != text(&meta["uid"])) {
        let why = format!(
            "Precondition failed: UID in precondition: {uid}, UID in object meta: {}",
            text(&meta["uid"])
        );
        return Err(ApiError::conflict(resource, name, &why));
    }
    if let Some(rv) = options.resource_version.as_deref().filter(|rv| *rv != text(&meta["resourceVersion"])) {
        let why = format!(
            "Precondition failed: ResourceVersion in precondition: {rv}, ResourceVersion in object meta: {}",
            text(&meta["resourceVersion"])
        );
        return Err(ApiError::conflict(resource, name, &why));
    }
    Ok(())
}

enum Grace {
    /// A deletion is in progress.
    Pending,
    Now,
    Period(i64),
}

/// `rest.BeforeDelete` and `podStrategy.CheckGracefulDelete`.
fn pod_grace(pod: &Value, requested: Option<i64>) -> Grace {
    let meta = &pod["metadata"];
    let mut period = requested.or_else(|| pod["spec"]["terminationGracePeriodSeconds"].as_i64()).unwrap_or(0);
    let phase = text(&pod["status"]["phase"]);
    if meta["deletionTimestamp"].is_string() {
        return match (requested, meta["deletionGracePeriodSeconds"].as_i64()) {
            (_, None) => Grace::Now,
            (None, Some(_)) => Grace::Pending,
            (Some(requested), Some(begun)) if requested >= begun => Grace::Pending,
            (Some(0), Some(_)) => Grace::Now,
            (Some(requested), Some(_)) => Grace::Period(requested),
        };
    }
    if text(&pod["spec"]["nodeName"]).is_empty() || phase == "Failed" || phase == "Succeeded" {
        period = 0;
    }
    match period {
        0 => Grace::Now,
        negative if negative < 0 => Grace::Period(1),
        seconds => Grace::Period(seconds),
    }
}

/// Returns a period as the API server computes it: nanoseconds in 64 bits, which wrap around.
fn period_as_go(seconds: i64) -> jiff::SignedDuration {
    jiff::SignedDuration::from_nanos(seconds.wrapping_mul(1_000_000_000))
}

fn mark_deleted(object: &mut Value, period: i64) {
    let meta = &mut object["metadata"];
    let already: Option<Timestamp> = meta["deletionTimestamp"].as_str().and_then(|t| t.parse().ok());
    let begun = match already {
        Some(until) => {
            let earlier = meta["deletionGracePeriodSeconds"].as_i64().unwrap_or(0);
            until - period_as_go(earlier)
        }
        None => Timestamp::now(),
    };
    if already.is_none()
        && let Some(generation) = meta["generation"].as_i64()
    {
        meta["generation"] = json!(generation + 1);
    }
    let until = begun + period_as_go(period);
    meta["deletionTimestamp"] = json!(until.strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
    meta["deletionGracePeriodSeconds"] = json!(period);
}

/// Returns whether a deleted object has no grace period and no finalizer left.
fn is_finished(object: &Value) -> bool {
    let meta = &object["metadata"];
    meta["deletionTimestamp"].is_string()
        && meta["deletionGracePeriodSeconds"].as_i64().unwrap_or(0) == 0
        && meta["finalizers"].as_array().is_none_or(Vec::is_empty)
}
