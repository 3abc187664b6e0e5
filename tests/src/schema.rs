//! What the document says of bodies: the smallest that are right, and a great many that are wrong.

use serde_json::{Map, Value, json};

/// The document that a node serves.
pub struct Document(Value);

/// A body that must be refused.
#[derive(Debug)]
pub struct Wrong {
    /// The member that is wrong, dotted; nothing if it is the whole.
    pub field: String,
    /// What is wrong with it.
    pub what: String,
    /// The body.
    pub body: Value,
}

impl Document {
    /// As it was served.
    pub fn new(document: Value) -> Self {
        Self(document)
    }

    /// The schema of an operation's JSON body, where it has one.
    pub fn body_of(&self, path: &str, method: &str) -> Option<&Value> {
        let operation = &self.0["paths"][path][method.to_lowercase()];
        let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
        schema.is_object().then(|| self.resolved(schema))
    }

    /// A schema itself, whatever refers to it.
    fn resolved<'a>(&'a self, schema: &'a Value) -> &'a Value {
        let wrapped = schema["allOf"].as_array().and_then(|all| all.first());
        if let Some(inner) = wrapped {
            return self.resolved(inner);
        }
        match schema["$ref"].as_str() {
            Some(name) => {
                let pointer = name.trim_start_matches('#');
                self.resolved(self.0.pointer(pointer).expect("what is referred to is there"))
            }
            None => schema,
        }
    }

    /// A right value with nothing in it that may be left out. What must be more than of the right shape is
    /// taken from `known`, by the name of the member.
    pub fn smallest(&self, schema: &Value, known: &Map<String, Value>) -> Value {
        let schema = self.resolved(schema);
        if let Some(first) = schema["enum"].as_array().and_then(|all| all.first()) {
            return first.clone();
        }
        let least = |name: &str| schema[name].as_u64().unwrap_or(0);
        match schema["type"].as_str() {
            Some("string") => {
                json!("a".repeat(usize::try_from(least("minLength").max(1)).expect("small")))
            }
            Some("integer" | "number") => json!(schema["minimum"].as_f64().unwrap_or(1.0) as i64),
            Some("boolean") => json!(true),
            Some("array") => match least("minItems") {
                0 => json!([]),
                _ => json!([self.smallest(&schema["items"], known)]),
            },
            _ => {
                let wanted = schema["required"].as_array().cloned().unwrap_or_default();
                let wanted = wanted.iter().filter_map(Value::as_str);
                let members =
                    wanted.map(|name| (name.to_owned(), self.member(schema, name, known)));
                Value::Object(members.collect())
            }
        }
    }

    fn member(&self, schema: &Value, name: &str, known: &Map<String, Value>) -> Value {
        let told = known.get(name).cloned();
        told.unwrap_or_else(|| self.smallest(&schema["properties"][name], known))
    }

    /// Bodies that are wrong in one place each: missing, of another type, too long, too short, out of range,
    /// not of the list, not known.
    pub fn wrongs(&self, schema: &Value, known: &Map<String, Value>) -> Vec<Wrong> {
        let mut all = vec![];
        for body in [json!(null), json!([]), json!("text"), json!(1), json!(true)] {
            let what = "is no object".to_owned();
            all.push(Wrong { field: String::new(), what, body });
        }
        let good = self.smallest(schema, known);
        self.wrong_members(schema, known, &good, &mut |field, what, body| {
            all.push(Wrong { field, what, body });
        });
        all
    }

    fn wrong_members(
        &self,
        schema: &Value,
        known: &Map<String, Value>,
        good: &Value,
        tell: &mut dyn FnMut(String, String, Value),
    ) {
        let schema = self.resolved(schema);
        if schema["additionalProperties"] == false {
            tell(
                "frobnicate".to_owned(),
                "not known".to_owned(),
                with(good, "frobnicate", json!(1)),
            );
        }
        for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            let mut body = good.clone();
            body.as_object_mut().expect("an object").remove(name);
            tell(name.to_owned(), "missing".to_owned(), body);
        }
        for (name, member) in schema["properties"].as_object().into_iter().flatten() {
            for (what, value) in self.wrong_values(member) {
                tell(name.clone(), what, with(good, name, value));
            }
            let inner = self.resolved(member);
            if inner["properties"].is_object() {
                let small = self.member(schema, name, known);
                self.wrong_members(inner, known, &small, &mut |field, what, value| {
                    tell(format!("{name}.{field}"), what, with(good, name, value));
                });
            }
        }
    }

    /// What a member may not be.
    fn wrong_values(&self, member: &Value) -> Vec<(String, Value)> {
        let schema = self.resolved(member);
        let mut all: Vec<(String, Value)> = vec![];
        let kind = schema["type"].as_str().unwrap_or("object");
        if !schema["type"].is_string() && !schema["properties"].is_object() {
            // Anything goes.
            return all;
        }
        let others = [
            ("string", json!("frobnicate")),
            ("integer", json!(1)),
            ("boolean", json!(true)),
            ("array", json!([])),
            ("object", json!({})),
        ];
        for (other, value) in others {
            let fits = other == kind || other == "integer" && kind == "number";
            if !fits {
                all.push((format!("{other} for {kind}"), value));
            }
        }
        if member["nullable"] != true {
            all.push(("null".to_owned(), json!(null)));
        }
        if schema["enum"].is_array() {
            all.push(("not of the list".to_owned(), json!("frobnicate")));
        }
        let size = |name: &str| schema[name].as_u64().and_then(|size| usize::try_from(size).ok());
        match kind {
            "string" => {
                all.extend(size("maxLength").map(|most| too("long", json!("a".repeat(most + 1)))));
                let least = size("minLength").filter(|least| *least > 0);
                all.extend(least.map(|least| too("short", json!("a".repeat(least - 1)))));
                if schema["pattern"].is_string() {
                    all.push(("against the pattern".to_owned(), json!("a\u{1}b")));
                }
            }
            "integer" | "number" => {
                all.extend(
                    schema["minimum"].as_f64().map(|least| too("small", json!(least - 1.0))),
                );
                all.extend(schema["maximum"].as_f64().map(|most| too("great", json!(most + 1.0))));
                if kind == "integer" {
                    all.push(("a fraction".to_owned(), json!(1.5)));
                }
            }
            "array" => {
                let item = self.smallest(&schema["items"], &Map::new());
                all.extend(size("maxItems").map(|most| too("long", json!(vec![item; most + 1]))));
                let least = size("minItems").filter(|least| *least > 0);
                all.extend(least.map(|_| too("short", json!([]))));
                all.push(("of wrong items".to_owned(), json!([{ "a": 1 }])));
            }
            _ => {}
        }
        all
    }
}

fn too(what: &str, value: Value) -> (String, Value) {
    (format!("too {what}"), value)
}

fn with(body: &Value, name: &str, value: Value) -> Value {
    let mut body = body.clone();
    body.as_object_mut().expect("an object").insert(name.to_owned(), value);
    body
}
