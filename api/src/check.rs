//! Request bodies, checked against the very schemas that the document shows.
//!
//! All wrong fields are told at once, by their path. Unknown fields are refused, so that a typo does
//! not pass silently; `null` for an optional field is the same as leaving it out.

use std::{
    collections::BTreeMap,
    sync::{LazyLock, OnceLock, PoisonError, RwLock},
};

use http::{StatusCode, header};
use poem::{FromRequest, Request, RequestBody};
use poem_openapi::{
    ApiExtractor, ApiExtractorType, ExtractParamOptions,
    payload::{ParsePayload, Payload},
    registry::{MetaMediaType, MetaRequest, MetaSchema, MetaSchemaRef, Registry},
    types::{ParseFromJSON, Type},
};
use regex::Regex;
use serde_json::{Map, Value, json};

use crate::error::Problem;

/// A checked body.
pub(crate) struct Checked<T> {
    /// The body.
    pub(crate) body: T,
    /// The body as JSON, where a patch must tell `null` from nothing, or a repetition from another call.
    pub(crate) json: Value,
}

/// A checked body that may be left out; nothing is the same as `{}`.
pub(crate) struct MaybeChecked<T>(pub(crate) Checked<T>);

impl<T: Type> Payload for Checked<T> {
    const CONTENT_TYPE: &'static str = "application/json";

    fn check_content_type(content_type: &str) -> bool {
        is_json(content_type)
    }

    fn schema_ref() -> MetaSchemaRef {
        T::schema_ref()
    }

    fn register(registry: &mut Registry) {
        T::register(registry);
    }
}

fn is_json(content_type: &str) -> bool {
    let kind = content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    kind == "application/json" || kind.starts_with("application/") && kind.ends_with("+json")
}

impl<T: ParseFromJSON> ParsePayload for Checked<T> {
    const IS_REQUIRED: bool = true;

    async fn from_request(request: &Request, body: &mut RequestBody) -> poem::Result<Self> {
        let bytes = read(request, body).await?;
        if bytes.is_empty() {
            return Err(Problem::new(
                StatusCode::BAD_REQUEST,
                "INVALID_JSON",
                "the body is empty; send a JSON object",
            )
            .into());
        }
        Ok(parse(&bytes)?)
    }
}

async fn read(request: &Request, body: &mut RequestBody) -> poem::Result<Vec<u8>> {
    <Vec<u8> as FromRequest>::from_request(request, body).await
}

fn parse<T: ParseFromJSON>(bytes: &[u8]) -> Result<Checked<T>, Problem> {
    let json: Value = serde_json::from_slice(bytes).map_err(|error| {
        let message = format!("the body is not JSON: {error}");
        Problem::new(StatusCode::BAD_REQUEST, "INVALID_JSON", message)
    })?;
    let mut complaints = Complaints::default();
    complaints.check(&T::schema_ref(), &json, "", schemas::<T>());
    complaints.verdict()?;
    let body = T::parse_from_json(Some(without_nulls(&json)))
        .map_err(|error| Problem::field("body", error.into_message()))?;
    Ok(Checked { body, json })
}

impl<T> Checked<T> {
    /// Refuses to remove (RFC 7396: `null`) any field but these.
    pub(crate) fn removes_only(&self, removable: &[&str]) -> Result<(), Problem> {
        let Value::Object(fields) = &self.json else { return Ok(()) };
        let mut removed = fields.iter().filter(|(_, value)| value.is_null()).map(|(name, _)| name);
        match removed.find(|name| !removable.contains(&name.as_str())) {
            Some(name) => Err(Problem::field(name, "can't be removed; leave it out to keep it")),
            None => Ok(()),
        }
    }
}

/// Whether a merge patch removes a field (RFC 7396).
pub(crate) fn is_removed(patch: &Value, field: &str) -> bool {
    patch.get(field).is_some_and(Value::is_null)
}

/// What a merge patch changes in a map: `null` in its place removes all its members.
pub(crate) fn members<V>(
    patch: &Value,
    field: &str,
    given: Option<BTreeMap<String, Option<String>>>,
    before: &BTreeMap<String, V>,
) -> BTreeMap<String, Option<String>> {
    match is_removed(patch, field) {
        true => before.keys().map(|name| (name.clone(), None)).collect(),
        false => given.unwrap_or_default(),
    }
}

/// `null` members of objects mean the same as absent ones to a typed body.
fn without_nulls(value: &Value) -> Value {
    match value {
        Value::Object(map) => Value::Object(
            map.iter()
                .filter(|(_, value)| !value.is_null())
                .map(|(key, value)| (key.clone(), value.clone()))
                .collect(),
        ),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
            value.clone()
        }
    }
}

/// Content types of a body that has one.
fn content_type(request: &Request) -> Option<&str> {
    request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok())
}

impl<'a, T: ParseFromJSON> ApiExtractor<'a> for Checked<T> {
    const TYPES: &'static [ApiExtractorType] = &[ApiExtractorType::RequestObject];
    type ParamType = ();
    type ParamRawType = ();

    fn register(registry: &mut Registry) {
        <Self as Payload>::register(registry);
    }

    fn request_meta() -> Option<MetaRequest> {
        Some(meta::<T>(true))
    }

    async fn from_request(
        request: &'a Request,
        body: &mut RequestBody,
        _: ExtractParamOptions<()>,
    ) -> poem::Result<Self> {
        match content_type(request) {
            Some(kind) if is_json(kind) => {
                <Self as ParsePayload>::from_request(request, body).await
            }
            _ => Err(not_json().into()),
        }
    }
}

impl<'a, T: ParseFromJSON> ApiExtractor<'a> for MaybeChecked<T> {
    const TYPES: &'static [ApiExtractorType] = &[ApiExtractorType::RequestObject];
    type ParamType = ();
    type ParamRawType = ();

    fn register(registry: &mut Registry) {
        <Checked<T> as Payload>::register(registry);
    }

    fn request_meta() -> Option<MetaRequest> {
        Some(meta::<T>(false))
    }

    async fn from_request(
        request: &'a Request,
        body: &mut RequestBody,
        _: ExtractParamOptions<()>,
    ) -> poem::Result<Self> {
        let bytes = read(request, body).await?;
        if bytes.is_empty() {
            return Ok(Self(parse(b"{}")?));
        }
        match content_type(request) {
            Some(kind) if is_json(kind) => Ok(Self(parse(&bytes)?)),
            _ => Err(not_json().into()),
        }
    }
}

fn meta<T: Type>(required: bool) -> MetaRequest {
    MetaRequest {
        description: None,
        content: vec![MetaMediaType { content_type: "application/json", schema: T::schema_ref() }],
        required,
    }
}

fn not_json() -> Problem {
    let message = "send the body as JSON, with `Content-Type: application/json`";
    Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "UNSUPPORTED_MEDIA_TYPE", message)
}

/// The schemas that `T` is made of, by name; made once.
fn schemas<T: Type>() -> &'static BTreeMap<String, MetaSchema> {
    type Known = RwLock<BTreeMap<String, &'static BTreeMap<String, MetaSchema>>>;
    static KNOWN: OnceLock<Known> = OnceLock::new();
    let known = KNOWN.get_or_init(Default::default);
    let name = T::name().into_owned();
    if let Some(schemas) = known.read().unwrap_or_else(PoisonError::into_inner).get(&name) {
        return schemas;
    }
    let mut registry = Registry::new();
    T::register(&mut registry);
    // As many leaks as there are body types.
    let schemas: &'static _ = Box::leak(Box::new(registry.schemas));
    known.write().unwrap_or_else(PoisonError::into_inner).insert(name, schemas);
    schemas
}

/// How many wrong fields are told at once.
const COMPLAINTS_MAX: usize = 20;

#[derive(Default)]
struct Complaints {
    wrong: Vec<(String, String)>,
    unknown: Vec<String>,
}

fn join(path: &str, name: &str) -> String {
    let name: String = name.chars().take(128).collect();
    if path.is_empty() { name } else { format!("{path}.{name}") }
}

impl Complaints {
    fn verdict(self) -> Result<(), Problem> {
        if self.unknown.is_empty() {
            return if self.wrong.is_empty() { Ok(()) } else { Err(Problem::invalid(self.wrong)) };
        }
        let message = format!("unknown fields: {}; check their spelling", self.unknown.join(", "));
        let mut fields: Vec<Value> = self
            .wrong
            .iter()
            .map(|(field, why)| json!({ "field": field, "message": why }))
            .collect();
        fields.extend(
            self.unknown.iter().map(|field| json!({ "field": field, "message": "is not known" })),
        );
        Err(Problem::new(StatusCode::BAD_REQUEST, "VALIDATION_ERROR", message)
            .with(json!({ "fields": fields, "unknown_fields": self.unknown })))
    }

    fn add(&mut self, path: &str, why: impl Into<String>) {
        if self.wrong.len() < COMPLAINTS_MAX {
            let path = if path.is_empty() { "body" } else { path };
            self.wrong.push((path.to_owned(), why.into()));
        }
    }

    fn check(
        &mut self,
        schema: &MetaSchemaRef,
        value: &Value,
        path: &str,
        known: &BTreeMap<String, MetaSchema>,
    ) {
        match schema {
            MetaSchemaRef::Inline(schema) => self.check_one(schema, value, path, known),
            MetaSchemaRef::Reference(name) => {
                if let Some(schema) = known.get(name) {
                    self.check_one(schema, value, path, known);
                }
            }
        }
    }

    fn check_one(
        &mut self,
        schema: &MetaSchema,
        value: &Value,
        path: &str,
        known: &BTreeMap<String, MetaSchema>,
    ) {
        for part in &schema.all_of {
            self.check(part, value, path, known);
        }
        match schema.ty {
            "object" => self.check_object(schema, value, path, known),
            "array" => self.check_array(schema, value, path, known),
            "string" => self.check_string(schema, value, path),
            "integer" | "number" => self.check_number(schema, value, path),
            "boolean" if !value.is_boolean() => self.add(path, "must be true or false"),
            _ => {}
        }
        if !schema.enum_items.is_empty() && !schema.enum_items.contains(value) {
            let items: Vec<_> = schema.enum_items.iter().map(Value::to_string).collect();
            self.add(path, format!("must be one of {}", items.join(", ")));
        }
    }

    fn check_object(
        &mut self,
        schema: &MetaSchema,
        value: &Value,
        path: &str,
        known: &BTreeMap<String, MetaSchema>,
    ) {
        let Value::Object(map) = value else {
            self.add(path, "must be an object");
            return;
        };
        if let Some(items) = &schema.additional_properties {
            if let Some(most) = schema.max_properties.filter(|most| map.len() > *most) {
                self.add(path, format!("must have at most {most} members"));
            }
            for (name, value) in map.iter().filter(|(_, value)| !value.is_null()) {
                self.check(items, value, &join(path, name), known);
            }
            return;
        }
        // An object without named members takes any.
        if schema.properties.is_empty()
            && schema.required.is_empty()
            && schema.title.is_none()
            && schema.rust_typename.is_none()
        {
            return;
        }
        self.check_members(schema, map, path, known);
    }

    fn check_members(
        &mut self,
        schema: &MetaSchema,
        map: &Map<String, Value>,
        path: &str,
        known: &BTreeMap<String, MetaSchema>,
    ) {
        for (name, value) in map {
            let Some((_, property)) = schema.properties.iter().find(|(known, _)| known == name)
            else {
                if self.unknown.len() < COMPLAINTS_MAX {
                    self.unknown.push(join(path, name));
                }
                continue;
            };
            let required = schema.required.contains(&name.as_str());
            match (value.is_null(), required) {
                (true, false) => {}
                (true, true) if !is_any(property) => {
                    self.add(&join(path, name), "must not be null")
                }
                _ => self.check(property, value, &join(path, name), known),
            }
        }
        for name in schema.required.iter().filter(|name| !map.contains_key(**name)) {
            self.add(&join(path, name), "is required");
        }
    }

    fn check_array(
        &mut self,
        schema: &MetaSchema,
        value: &Value,
        path: &str,
        known: &BTreeMap<String, MetaSchema>,
    ) {
        let Value::Array(items) = value else {
            self.add(path, "must be a list");
            return;
        };
        if let Some(most) = schema.max_items.filter(|most| items.len() > *most) {
            self.add(path, format!("must have at most {most} items"));
        }
        if let Some(least) = schema.min_items.filter(|least| items.len() < *least) {
            self.add(path, format!("must have at least {least} items"));
        }
        if let Some(schema) = &schema.items {
            for (place, item) in items.iter().enumerate().take(COMPLAINTS_MAX * 10) {
                self.check(schema, item, &format!("{path}[{place}]"), known);
            }
        }
    }

    fn check_string(&mut self, schema: &MetaSchema, value: &Value, path: &str) {
        let Value::String(text) = value else {
            self.add(path, "must be a string");
            return;
        };
        let length = text.chars().count();
        if let Some(most) = schema.max_length.filter(|most| length > *most) {
            self.add(path, format!("must have at most {most} characters"));
        } else if let Some(least) = schema.min_length.filter(|least| length < *least) {
            self.add(path, format!("must have at least {least} characters"));
        } else if let Some(pattern) = &schema.pattern
            && !matches(pattern, text)
        {
            let why = match pattern == TITLE {
                true => "must be a line of text, and not blank".to_owned(),
                false => format!("must match {pattern}"),
            };
            self.add(path, why);
        }
    }

    fn check_number(&mut self, schema: &MetaSchema, value: &Value, path: &str) {
        let is_whole = value.is_i64() || value.is_u64();
        let Some(number) = value.as_f64().filter(|_| schema.ty == "number" || is_whole) else {
            self.add(
                path,
                if schema.ty == "integer" { "must be a whole number" } else { "must be a number" },
            );
            return;
        };
        let too_low = schema.minimum.is_some_and(|least| number < least);
        let too_high = schema.maximum.is_some_and(|most| number > most);
        match (schema.minimum, schema.maximum) {
            (Some(least), Some(most)) if too_low || too_high => {
                self.add(path, format!("must be {least} to {most}"));
            }
            (Some(least), _) if too_low => self.add(path, format!("must be at least {least}")),
            (_, Some(most)) if too_high => self.add(path, format!("must be at most {most}")),
            _ => {}
        }
    }
}

fn is_any(schema: &MetaSchemaRef) -> bool {
    matches!(schema, MetaSchemaRef::Inline(schema) if schema.ty.is_empty() || schema.ty == "object" && schema.properties.is_empty())
}

fn matches(pattern: &str, text: &str) -> bool {
    static COMPILED: LazyLock<Vec<Regex>> = LazyLock::new(|| {
        PATTERNS.iter().map(|p| Regex::new(p).expect("our own patterns are right")).collect()
    });
    COMPILED.iter().find(|regex| regex.as_str() == pattern).is_none_or(|regex| regex.is_match(text))
}

/// Every pattern that a body uses.
pub(crate) const PATTERNS: [&str; 5] = [NAME, REPO, SHA256, VERSION, TITLE];
/// One line of text for people, not blank.
pub(crate) const TITLE: &str = r"^[^\x00-\x1F\x7F]*[^\x00-\x20\x7F][^\x00-\x1F\x7F]*$";
/// Names of agents and clouds.
pub(crate) const NAME: &str = "^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$";
/// `owner/repository`.
pub(crate) const REPO: &str = "^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}/[A-Za-z0-9_.-]{1,100}$";
/// The version of a language.
pub(crate) const VERSION: &str = "^[A-Za-z0-9][A-Za-z0-9._-]{0,31}$";
/// Lower-case hexadecimal.
pub(crate) const SHA256: &str = "^[0-9a-f]{64}$";
